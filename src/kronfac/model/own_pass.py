"""How K-FAC runs the model: in full precision, without fast paths and reentrant checkpoints.

A step may be taken inside `torch.autocast`. The gradient of a mini-batch can be computed in half precision;
second moments, their inverses, the quadratic model and small changes of the loss can't. The fast path of
`nn.Transformer*` leaves out padding, and reentrant checkpoints have no derivative but their own.

Nothing is switched for the process: a `TorchFunctionMode` belongs to its thread, and so does what stands in
for checkpoints here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
Context = Callable[[], AbstractContextManager[object]]


# ---------------------------------------------------------------------------------------- precision


def mixed(device: torch.device) -> bool:
    """Whether `torch.autocast` is in force for tensors on this device."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextmanager
def full_precision(device: torch.device) -> Iterator[Context]:
    """Switch autocast off; the context that this gives restores the caller's, for the closure."""
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


@contextmanager
def own_pass() -> Iterator[None]:
    """Run the modules' own code, in full precision, without reentrant checkpoints.

    Checkpoints of the other kind stay: they have all derivatives, and save memory.
    """
    before = torch._C._is_any_autocast_enabled() and _autocast_kinds()
    try:
        with instead_of_checkpoints(_call), _IN_FULL:
            yield
    finally:
        for kind in before or ():
            torch.set_autocast_enabled(kind, True)


class _InFull(TorchFunctionMode):
    """Switches off an autocast that a module opens in its own forward.

    Modules with a fast path do not take it while any mode is active.
    """

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch._C._is_any_autocast_enabled():
            for kind in _autocast_kinds():
                torch.set_autocast_enabled(kind, False)
        return func(*args, **(kwargs or {}))


_IN_FULL = _InFull()


def _autocast_kinds() -> list[str]:
    """The kinds of devices that autocast is enabled for."""
    return [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]


# --------------------------------------------------------------------------------------- checkpoints

_handlers: dict[int, list[Function]] = {}
"""What each thread does in place of a reentrant checkpoint."""
_lock = threading.Lock()


def _checkpoints() -> Any:
    """Torch's module, when a pass first needs it: torch 2.7 imports it, and sympy with it, only then."""
    from torch.utils import checkpoint  # noqa: PLC0415

    return checkpoint


class _StandIn:
    """In place of torch's function while a thread has a handler; for other threads it is that function."""

    original: Any = None

    @classmethod
    def apply(cls, function: Function, preserve_rng_state: bool, *args: Any) -> Any:
        """What `torch.utils.checkpoint` calls."""
        own = _handlers.get(threading.get_ident())
        call = own[-1] if own else cls.original.apply
        return call(function, preserve_rng_state, *args)


@contextmanager
def instead_of_checkpoints(handler: Function) -> Iterator[None]:
    """Let this thread call `handler(function, preserve_rng_state, *args)` for reentrant checkpoints."""
    thread, checkpoints = threading.get_ident(), _checkpoints()
    with _lock:
        if not _handlers:
            _StandIn.original = checkpoints.CheckpointFunction
            checkpoints.CheckpointFunction = _StandIn
        _handlers.setdefault(thread, []).append(handler)
    try:
        yield
    finally:
        with _lock:
            _handlers[thread].pop()
            if not _handlers[thread]:
                del _handlers[thread]
            if not _handlers:
                checkpoints.CheckpointFunction = _StandIn.original


def _call(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def not_reentrant(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    """The other kind of checkpoint: the same values and memory, and a graph that can be looked into."""
    return _checkpoints().checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )
