"""f and J v of a micro-batch: by forward mode, or by central differences where torch has none."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from kronfac.errors import out_of_memory
from kronfac.model import Matrices, Network, dot
from kronfac.model.side_effects import unseen_writes
from kronfac.record import Pass

SHARE = 0.0625
"""Size of what v moves, in units of ‖θ‖: embeddings of size 0.02 stand beside scales of 1."""


def outputs_and_jvp(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, and J v there, (k, …), by forward mode if the network has it."""
    if network.learned.forward_mode:
        try:
            return by_forward_mode(network, part, directions)
        except (NotImplementedError, RuntimeError) as error:
            # Operations without a forward-mode derivative; another error comes up again below.
            lasts = not out_of_memory(error)
        found = by_differences(network, part, directions)
        network.learned.forward_mode = not lasts
        return found
    return by_differences(network, part, directions)


@torch.no_grad()
def by_differences(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, up to ε², and J v there, (k, …), for any forward pass.

    J v ≈ (f(θ + εv) − f(θ − εv)) / 2ε, with the same random numbers in both passes. The error is of the
    order of ε² by curvature, and of the dtype's precision over ε by rounding. The two balance where ε ‖v‖
    is the cube root of the precision, times the size of what v moves: less than ‖θ‖, which the weights of
    1 in normalisation layers dominate. Kinks (ReLU) between the two points cost in proportion to ε. A jump,
    where an example goes to another expert, costs its height over ε, and is rarer for a smaller ε:
    `base.py` takes a smaller one where J v does not agree with the gradient.
    """
    theta = network.theta()
    size = float(dot(theta, theta)) ** 0.5 or 1.0
    precision: float = (
        SHARE * torch.finfo(network.dtype).eps ** (1 / 3) * network.learned.difference
    )
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        norm = float(dot(direction, direction)) ** 0.5
        epsilon = precision * size / norm if norm > 0 else 1.0
        with unseen_writes(network.parameters):
            with network.displaced(direction, epsilon):
                above = part.run(network.model)
            with network.displaced(direction, -epsilon):
                below = part.run(network.model)
        found.append([(a - b) / (2 * epsilon) for a, b in zip(above, below, strict=True)])
        values = [(a + b) / 2 for a, b in zip(above, below, strict=True)]
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]


@torch.no_grad()
def by_forward_mode(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, and J v there, (k, …), with dual numbers as parameters.

    θ and its tangent go through one pass. The dual numbers are given to torch functions in the place of
    parameters, in this thread alone: the model's code may do anything with its parameters, and other
    threads that evaluate the model see nothing of it.

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
