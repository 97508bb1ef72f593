"""f and J v by forward-mode differentiation: one pass per direction, with dual numbers as parameters.

A `TorchFunctionMode` puts the dual numbers in the places of parameters, wherever this thread gives them to
a torch function: the code of the model and of the closure may do anything with them, and other
threads that evaluate the model meanwhile see none of it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from kronfac.model import Matrices, Network
from kronfac.record import Pass


class DualParameters(TorchFunctionMode):
    """Gives this thread's torch functions other tensors in the place of parameters, by their ids."""

    def __init__(self, duals: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._duals = duals

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {name: self._replace(value) for name, value in (kwargs or {}).items()}
        # What a model computes without gradients is a constant to backward mode: so it is here.
        with nullcontext() if torch.is_grad_enabled() else forward_ad._set_fwd_grad_enabled(False):
            return func(*map(self._replace, args), **given)

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._duals.get(id(value), value)
        if type(value) in (list, tuple):  # as recurrent layers get their weights
            return type(value)(map(self._replace, value))
        return value


@cache
def _load_decompositions() -> None:
    """Let torch load what its first dual number needs, without the warning that this gives.

    It calls `torch.jit.script`, which is deprecated: `python -W error` would stop here, and the user can do
    nothing about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


@torch.no_grad()
def outputs_and_jvp(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, and J v there, (k, …): a pass computes both.

    Raises:
        NotImplementedError, RuntimeError: an operation has no forward-mode derivative.
    """
    _load_decompositions()
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        # At its end all tangents are gone, also if the pass fails.
        with forward_ad.dual_level():
            pairs = zip(network.parameters, network.split(direction), strict=True)
            # Copies: what a forward pass writes to its parameters is not for this pass to write.
            duals = {id(p): forward_ad.make_dual(p.detach().clone(), v) for p, v in pairs}
            # This makes no graph: dual numbers need no gradients.
            with torch.enable_grad(), DualParameters(duals):
                outputs = part.run(network.model)
            unpacked = [forward_ad.unpack_dual(z) for z in outputs]
            values = [z.detach() for z, _ in unpacked]
            found.append([torch.zeros_like(z) if Jv is None else Jv for z, Jv in unpacked])
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]
