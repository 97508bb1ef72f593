"""Mixed precision: the closure computes as its caller wishes, K-FAC itself in the parameters' dtype.

A step may be taken inside `torch.autocast`. The gradient of a mini-batch can be had in half precision;
second moments, their inverses, the quadratic model and small changes of the loss can't.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

Context = Callable[[], AbstractContextManager[object]]


def mixed(device: torch.device) -> bool:
    """Whether `torch.autocast` is in force for tensors on this device."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextmanager
def full_precision(device: torch.device) -> Iterator[Context]:
    """No autocast while this lasts; it gives the caller's own back as a context, for the closure."""
    if not mixed(device):
        # No context at all: a closure's own autocast would not be the outermost and keep its cache.
        yield nullcontext
        return
    kind = device.type
    # Without its cache of weights: a closure may be called again with other parameters.
    callers = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=False)
    try:
        with torch.autocast(kind, enabled=False):
            yield callers
    finally:
        torch.clear_autocast_cache()  # of weights from before the step
