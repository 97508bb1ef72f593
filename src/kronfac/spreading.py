"""A mini-batch over several processes: a rank's own evaluation, with what it needs of the others'.

Every rank tells the others how many examples it has, its loss, and whether it has come so far at all. Then
all know the objective, Σ_r share_r h_r, and each has its terms scaled by its share, see
`distributed/spread.py`.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from itertools import accumulate

import torch

from kronfac.distributed import Phase, Ranks, Spread
from kronfac.distributed.world import on_device
from kronfac.errors import RankError
from kronfac.evaluation import Evaluation
from kronfac.gradient_sum import GradientSum
from kronfac.linearization import can_be_explicit
from kronfac.network import Network, terms_of_examples

SAME_DIVISOR = 1e-6
"""Relative difference up to which the parts of a rank's loss are one mean."""


@dataclass(frozen=True)
class _Header:
    """What a rank tells the others of its own mini-batch."""

    found: float
    """Whether there is anything to take a step from."""
    examples: float = 0.0
    terms: float = 0.0
    seen: float = 1.0
    summed: float = 1.0
    divisor: float = math.nan
    """What its mean was divided by; NaN if it is several means."""
    returned: float = 0.0
    loss: float = 0.0
    seen_loss: float = 0.0
    weight: float = 0.0
    explicit: float = 1.0
    network: float = 0.0
    """A fingerprint of units and blocks."""
    parameters: float = 0.0
    """One of the parameters, at the first step."""
    gradient: float = 0.0
    """One of the gradient in the parameters, as long as it is not known whose that is."""


_LENGTH = len(fields(_Header))
"""Numbers of a message before the terms that each example has, of every kind of loss call."""


def spread_out(
    world: Ranks,
    evaluate: Callable[[], Evaluation | None],
    *,
    iteration: int,
    wrapped: bool | None,
    sums: bool = True,
) -> tuple[Evaluation | None, bool | None]:
    """This rank's evaluation as part of that of all ranks; None if a rank has nothing to take a step from.

    Args:
        world: the ranks.
        evaluate: of this rank's own examples.
        iteration: of the step; at the first one it is looked at whether the ranks have the same parameters.
        wrapped: whether something averages gradients over the ranks, as DistributedDataParallel does; None
            to find out.
        sums: whether gradients are wanted at all; the same on all ranks.

    Returns:
        The evaluation, and whether gradients are averaged, if that is known now.

    Raises:
        RankError: another rank has failed, or trains something else.
    """
    found = evaluate()
    if world.size == 1:
        return found, wrapped
    header = _Header(0.0) if found is None else _header(found, iteration, wrapped)
    summing = None
    if sums and found is not None and not (wrapped and not found.batch.traced):
        summing = GradientSum(world, found.network, found.fresh)
    each = [] if found is None else terms_of_examples(found.network, found.batch)
    told = [*astuple(header), *map(float, each)]
    gathered = world.gather(Phase.EVALUATION, told)
    rows = [_Header(*row[:_LENGTH]) for row in gathered]
    if not all(row.found for row in rows) or found is None:
        return None, wrapped
    _refuse_differences(rows, found.network)
    if wrapped is None and any(row.gradient for row in rows):
        # If all have the same, it has been averaged; or they have the same examples, and it makes no odds.
        wrapped = len({row.gradient for row in rows}) == 1
    shares = _shares(rows, bool(wrapped))
    if wrapped and not found.batch.traced:  # K-FAC's own backward pass has no hooks that average
        summing = None
    elif summing is not None:
        summing.start(shares[world.rank])  # nothing that can fail may come before this
    spread = _spread(world, rows, shares, [list(map(int, row[_LENGTH:])) for row in gathered])
    return replace(_join(found, spread, rows, shares), summing=summing), wrapped


def _header(evaluation: Evaluation, iteration: int, wrapped: bool | None) -> _Header:
    batch, network = evaluation.batch, evaluation.network
    seen = batch.seen_loss
    divisors = [terms.divisor for part in batch.passes for terms in part.terms]
    same = all(math.isclose(d, divisors[0], rel_tol=SAME_DIVISOR) for d in divisors)
    return _Header(
        found=1.0,
        examples=float(batch.examples),
        terms=float(batch.most_terms),
        seen=float(seen is not None),
        summed=float(batch.summed),
        divisor=divisors[0] if same else math.nan,
        returned=float(evaluation.returned_loss),
        loss=float(evaluation.loss),
        seen_loss=0.0 if seen is None else float(seen),
        weight=evaluation.resolution / torch.finfo(network.dtype).eps,
        explicit=float(can_be_explicit(network, batch)),
        network=float(zlib.crc32(_description(network).encode())),
        parameters=_fingerprint(list(network.parameters)) if iteration == 1 else 0.0,
        gradient=_gradient_fingerprint(network) if wrapped is None else 0.0,
    )


def _description(network: Network) -> str:
    units = (f"{u.names} {u.block.describe(*u.shape)} {u.shape}" for u in network.units)
    return "\n".join([*units, str(list(network.links))])


def _fingerprint(tensors: list[torch.Tensor]) -> float:
    """A number that differs if any number of the tensors does, but for a coincidence."""
    total = 0.0
    for n, tensor in enumerate(tensors):
        flat = tensor.detach().double().reshape(-1)
        places = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
        total += (n + 1) * float(flat @ places.sqrt_())
    return total


def _gradient_fingerprint(network: Network) -> float:
    return _fingerprint([p.grad for p in network.parameters if p.grad is not None])


def _refuse_differences(rows: list[_Header], network: Network) -> None:
    """Refuse ranks that do not train the same network from the same parameters."""
    if len({row.network for row in rows}) > 1:
        raise RankError(
            "The ranks have different networks, or their first mini-batches use them differently: layers "
            f"or curvature blocks are not the same as those of this rank ({len(network.units)} units). "
            "Make the same model with the same settings on all ranks."
        )
    if len({row.parameters for row in rows}) > 1:
        raise RankError(
            "The ranks start from different parameters, and would train apart. Call torch.manual_seed with "
            "the same seed before the model is made, load the same checkpoint, or wrap the model in "
            "DistributedDataParallel, which takes those of rank 0."
        )


def _spread(
    world: Ranks, rows: list[_Header], shares: list[float], terms: list[list[int]]
) -> Spread:
    """This rank's place in the mini-batch."""
    own = rows[world.rank]
    pairs = list(zip(shares, rows, strict=True))
    starts = (0, *accumulate(int(row.examples) for row in rows))
    kinds = {len(each) for each in terms}
    return Spread(
        world,
        shares[world.rank],
        start=starts[world.rank],
        starts=starts,
        terms=terms if len(kinds) == 1 and kinds != {0} else None,
        examples_elsewhere=int(starts[-1] - own.examples),
        terms_elsewhere=int(sum(row.terms for row in rows) - own.terms),
        seen_loss=math.fsum(s * row.seen_loss for s, row in pairs),
        weight=math.fsum(s * row.weight for s, row in pairs),
        explicit=all(row.explicit for row in rows),
    )


def _join(
    evaluation: Evaluation, spread: Spread, rows: list[_Header], shares: list[float]
) -> Evaluation:
    """The evaluation with its terms scaled by the rank's share, and the losses of all ranks."""
    pairs = list(zip(shares, rows, strict=True))
    batch = evaluation.batch.scaled(spread.share)
    if not all(row.seen for row in rows):
        batch = replace(batch, seen=False)
    losses = [
        on_device(math.fsum(s * getattr(row, name) for s, row in pairs), old)
        for name, old in (("returned", evaluation.returned_loss), ("loss", evaluation.loss))
    ]
    return replace(
        evaluation,
        batch=batch,
        returned_loss=losses[0],
        loss=losses[1],
        factors=None,  # of this rank's examples alone
        spread=spread,
    )


def _shares(rows: list[_Header], wrapped: bool) -> list[float]:
    """What every rank's loss counts in the objective."""
    if wrapped:
        return [1 / len(rows)] * len(rows)
    if all(row.summed for row in rows):
        return [1.0] * len(rows)
    sizes = [row.divisor for row in rows]
    if not all(0 < size < math.inf for size in sizes):
        sizes = [row.examples for row in rows]
    return [size / math.fsum(sizes) for size in sizes]
