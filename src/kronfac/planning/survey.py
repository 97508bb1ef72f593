"""A few examples taken through the network once: what is seen of every unit, and what that takes.

The graph, the taps and the moments are made as a step makes them, counted and forgotten.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kronfac.curvature import (
    AnyTap,
    ApproximateInverse,
    GroupedTap,
    InverseCost,
    Moments,
    SummedGradient,
    Tap,
    Taps,
)
from kronfac.gradient_comparison import unseen_uses
from kronfac.linearization import ByHand, Traced, linearize
from kronfac.linearization.traced import WRONG_TANGENTS
from kronfac.network import Batch, Matrices, Network, Pass, subsets
from kronfac.network.learned import Learned
from kronfac.network.plain import PlainKernels
from kronfac.storage import tensors_in

FEW = 8
"""Examples that are taken through the network, if it can be divided into examples."""
BY_HAND, FORWARD_MODE, FINITE_DIFFERENCES = "by hand", "forward mode", "finite differences"


@dataclass(frozen=True)
class Seen:
    """What is seen of one unit."""

    moments: int
    """Numbers that its moments have."""
    packed: int
    """Numbers that they are sent as."""
    factors: str
    """Their names and sizes."""
    inverse: InverseCost
    uses: float
    """Multiplications of V with its inputs, per example."""
    statistics: float
    """Multiplications that make the moments, per example."""


@dataclass(frozen=True)
class Survey:
    """What a few examples show."""

    network: Network
    """With diagonal blocks for units whose uses are not all seen."""
    units: list[Seen]
    forward: float
    """Multiplications of a forward pass, per example."""
    outputs: int
    """Outputs of an example, over all loss calls."""
    engine: str


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counter: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if counter is not None:
            self.count += counter(*args, **kwargs, out_val=result) / 2
        return result


@torch.no_grad()
def survey(network: Network, batch: Batch, inverse: ApproximateInverse) -> Survey:
    """Take the first few examples of a mini-batch through the network."""
    (some,) = subsets(network, batch, [min(FEW, batch.examples)], None)
    # One pass is enough; micro-batches are alike.
    part = some.passes[0]
    view = Traced(network, part)
    outputs = view.outputs
    with PlainKernels(), Multiplications() as forward:
        part.run(network.model)
    vectors = [_random_like(z) for z in outputs]
    taps = view.taps(vectors)
    if network.device.type != "meta":
        network = network.demoted(
            unseen_uses(network, view, vectors, taps),
            "its gradient is not the one rebuilt from the uses that are seen",
        )
    del view
    units = [_seen(network, n, own, part.examples, inverse) for n, own in enumerate(taps)]
    examples = max(part.examples, 1)
    return Survey(
        network,
        units,
        # Torch does not count all fused kernels; but what is trained is multiplied once at the least.
        max(
            forward.count / examples,
            sum(unit.uses for unit in units),
            sum(p.numel() for p in network.parameters),
        ),
        round(sum(z.numel() for z in outputs) / examples),
        _engine(network, part),
    )


def _seen(
    network: Network, number: int, taps: Taps, examples: int, inverse: ApproximateInverse
) -> Seen:
    unit = network.units[number]
    if not unit.observed:
        zeros = torch.zeros(unit.shape, dtype=unit.dtype, device=network.device)
        shown: Taps = SummedGradient(zeros)
    else:
        shown = taps or network.unused(number)
    with Multiplications() as made:
        moments = unit.block.observe(shown, 1.0, 1.0)
    rows, columns = unit.shape
    vectors = 0 if isinstance(shown, SummedGradient) else sum(map(_vectors, shown))
    return Seen(
        sum(tensor.numel() for tensor in tensors_in(moments)),
        moments.packed(),
        _sizes(moments),
        inverse.cost(moments),
        rows * columns * vectors / examples,
        made.count / examples,
    )


def _vectors(tap: AnyTap) -> int:
    """How many vectors V was multiplied with; for products of numbers one by one, none."""
    if isinstance(tap, Tap):
        return tap.grads.shape[0] * tap.grads.shape[1]
    return tap.grads.shape[1] * tap.grads.shape[2] if isinstance(tap, GroupedTap) else 0


def _sizes(moments: Moments) -> str:
    named = [(name, value) for name, value in vars(moments).items() if isinstance(value, Tensor)]
    return ", ".join(f"{name} {'×'.join(map(str, value.shape))}" for name, value in named)


# --------------------------------------------------------------------------------------------- engine


def _engine(network: Network, part: Pass) -> str:
    """How J v is taken, tried out as the first step will; without storage that can't be."""
    view = linearize(network, part)
    if isinstance(view, ByHand):
        return BY_HAND
    if network.device.type == "meta":
        return FORWARD_MODE  # which most networks have
    learned = Learned(forward_mode=network.learned.forward_mode)
    trial = Traced(replace(network, learned=learned), part)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trial.jvp([_direction(network)])
    engine = FORWARD_MODE if learned.forward_mode else FINITE_DIFFERENCES
    wrong = any(str(warning.message) == WRONG_TANGENTS for warning in warned)
    return f"{engine}, which do not agree with the gradient" if wrong else engine


def _direction(network: Network) -> Matrices:
    """A direction of the size of θ, with every unit in it."""
    theta = network.theta()
    noise: Sequence[Tensor] = [_random_like(V) for V in theta]
    return tuple(
        v * (V.norm() / V.numel() ** 0.5).clamp(min=1e-3) for v, V in zip(noise, theta, strict=True)
    )


def _random_like(tensor: Tensor) -> Tensor:
    """Numbers from a generator of their own."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return drawn.to(tensor.device)
