"""How the examples of one mini-batch are spread over processes.

The objective is Σ_r share_r h_r over the ranks r, where h_r is the loss of a rank's own examples. With
gradients that every rank has for itself, a mean over examples stays one: the share is what a rank has of
all examples, or of the weight of their targets. With gradients that have been averaged already, as
DistributedDataParallel does, it is 1 over the number of ranks. For losses that are sums it is 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kronfac.distributed.world import ALONE, Ranks


@dataclass(frozen=True)
class Spread:
    """A rank's place in a mini-batch."""

    world: Ranks = ALONE
    share: float = 1.0
    """What the rank's own loss counts in the objective; its terms have that factor already."""
    start: int = 0
    """How many examples the ranks before it have."""
    starts: Sequence[int] = ()
    """How many examples the ranks before each rank have; then how many all have."""
    terms: Sequence[Sequence[int]] | None = None
    """By rank, the terms that each of its examples has, of every kind of loss call; None if examples can't
    be chosen one by one on some rank, or differ in their terms."""
    examples_elsewhere: int = 0
    terms_elsewhere: int = 0
    seen_loss: float = 0.0
    """The loss that was seen, of all ranks: one sum, or it would be rounded differently on each."""
    weight: float = 0.0
    """The total weight of the terms of saturating losses, of all ranks."""
    explicit: bool = True
    """Whether no rank has too many examples to hold J as a matrix."""

    @property
    def alone(self) -> bool:
        """Whether there is one process."""
        return self.world.size == 1


HERE = Spread()
"""All of the mini-batch in one process."""


@dataclass(frozen=True)
class Place:
    """Where a rank's part of S₁ and S₂ stands in the whole of them."""

    statistics: int
    """Examples of S₁ on all ranks."""
    fisher: int
    """Examples of S₂ on all ranks."""
    heads: Sequence[tuple[int, int]]
    """For every kind of loss call on S₁, in the order in which they come: terms on all ranks, and on the
    ranks before this one."""
    start: int = 0
    """Examples of S₁ on the ranks before this one."""
