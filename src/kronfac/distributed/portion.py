"""How one mini-batch is divided among the ranks.

The objective is Σ_r share_r h_r over the ranks r, where h_r is the loss of a rank's own examples. A mean
over examples stays one: the share is the rank's part of all examples, or of the weight of their targets. If
gradients have been averaged already, as DistributedDataParallel does, the share is 1 over the number of
ranks. For losses that are sums it is 1.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from kronfac.distributed.world import ALONE, World
from kronfac.errors import RankError


@dataclass(frozen=True)
class Portion:
    """This rank's portion of a mini-batch, and the sums over all ranks."""

    world: World = ALONE
    share: float = 1.0
    """The factor of the rank's own loss in the objective; its terms have that factor already."""
    start: int = 0
    """Examples of the ranks before this one."""
    examples_elsewhere: int = 0
    terms_elsewhere: int = 0
    returned_loss: float = 0.0
    """The loss that closures have returned. One sum for all ranks, or each would round it differently."""
    loss: float = 0.0
    """Equal to `returned_loss`, except for closures in half precision."""
    recorded_loss: float | None = None
    """The recorded loss; None if it was not recorded on some rank."""
    weight: float = 0.0
    """The total weight of the terms of saturating losses."""
    averaged: bool | None = None
    """Whether something averages gradients over the ranks, as DistributedDataParallel does; None if that is
    not known yet."""


HERE = Portion()
"""All of the mini-batch in one process."""


@dataclass(frozen=True)
class OwnPart:
    """The numbers of a rank's own part of a mini-batch."""

    found: float
    """Whether there is anything to take a step from."""
    examples: float = 0.0
    terms: float = 0.0
    seen: float = 1.0
    """Whether the loss was recorded."""
    summed: float = 1.0
    """Whether the loss is a sum over examples."""
    divisor: float = math.nan
    """The divisor of a mean; NaN if the loss consists of several means."""
    returned_loss: float = 0.0
    loss: float = 0.0
    recorded_loss: float = 0.0
    weight: float = 0.0
    network: float = 0.0
    """A fingerprint of units and blocks."""
    parameters: float = 0.0
    """One of the parameters, in the first step."""
    gradient: float = 0.0
    """One of the gradient in the parameters, as long as it is not known whether it is averaged."""


def gather_parts(world: World, own: OwnPart, averaged: bool | None) -> Portion | None:
    """This rank's portion of the mini-batch; None if some rank has no data for a step.

    Raises:
        RankError: another rank has failed, or trains another network or from other parameters.
    """
    parts = [OwnPart(*row) for row in world.gather(astuple(own), "evaluation")]
    if not all(part.found for part in parts):
        return None
    _refuse_differences(parts)
    if averaged is None and any(part.gradient for part in parts):
        # Equal gradients have been averaged; or the ranks have the same examples, and it does not matter.
        averaged = len({part.gradient for part in parts}) == 1
    shares = _shares(parts, bool(averaged))

    def total(name: str) -> float:
        return math.fsum(s * getattr(part, name) for s, part in zip(shares, parts, strict=True))

    return Portion(
        world,
        shares[world.rank],
        start=int(sum(part.examples for part in parts[: world.rank])),
        examples_elsewhere=int(sum(part.examples for part in parts) - own.examples),
        terms_elsewhere=int(sum(part.terms for part in parts) - own.terms),
        returned_loss=total("returned_loss"),
        loss=total("loss"),
        recorded_loss=total("recorded_loss") if all(part.seen for part in parts) else None,
        weight=total("weight"),
        averaged=averaged,
    )


def fingerprint(tensors: Sequence[Tensor]) -> float:
    """A number that changes with any element of the tensors, except by coincidence."""
    total = 0.0
    for n, tensor in enumerate(tensors):
        flat = tensor.detach().double().reshape(-1)
        places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        total += (n + 1) * float(flat @ places.sqrt_())
    return total


def _refuse_differences(parts: Sequence[OwnPart]) -> None:
    """Refuse ranks that do not train the same network from the same parameters."""
    if len({part.network for part in parts}) > 1:
        raise RankError(
            "The ranks have different networks, or their first mini-batches use them differently: layers "
            "or curvature blocks are not the same. Make the same model with the same settings on all ranks."
        )
    if len({part.parameters for part in parts}) > 1:
        raise RankError(
            "The ranks start from different parameters, and would train apart. Call torch.manual_seed with "
            "the same seed before the model is made, load the same checkpoint, or wrap the model in "
            "DistributedDataParallel, which copies them from rank 0."
        )


def _shares(parts: Sequence[OwnPart], averaged: bool) -> list[float]:
    """The factor of every rank's loss in the objective."""
    if averaged:
        return [1 / len(parts)] * len(parts)
    if all(part.summed for part in parts):
        return [1.0] * len(parts)
    sizes = [part.divisor for part in parts]
    if not all(0 < size < math.inf for size in sizes):
        sizes = [part.examples for part in parts]
    return [size / math.fsum(sizes) for size in sizes]
