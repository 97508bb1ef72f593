"""The curvature of all units: moments, and cross moments of neighbours in a chain [MG15 §4.3, §5]."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kronfac.curvature.block import Block, Moments, Part
from kronfac.curvature.kronecker import KroneckerBlock, Product, direct_or_transposed
from kronfac.curvature.taps import Rows, SummedGradient, Taps
from kronfac.errors import StateError
from kronfac.storage import Layout, Storable, check_shapes

CEILING = 0.95
"""The largest decay of the moving averages in the paper: they remember 20 iterations [MG15 §5]."""


@dataclass(frozen=True)
class Link(Storable):
    """Second moments between a unit and the next one in a chain [MG15 §4.3]."""

    A_next: Tensor  # E[ā ā'ᵀ] (columns, columns')
    G_next: Tensor  # E[g g'ᵀ] (rows, rows')

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be between these two units."""
        this, other = units
        between = {"A_next": (this.columns, other.columns), "G_next": (this.rows, other.rows)}
        check_shapes(self, between, this)


@dataclass(frozen=True)
class Curvature(Storable):
    """Moving averages of the statistics of all units: a value."""

    blocks: tuple[Moments, ...]
    links: tuple[Link | None, ...] = ()
    """Between each unit and the next; None if they are not neighbours in a chain. Empty without chains."""
    examples: float = math.inf
    """How many examples of equal weight would be as sure an estimate."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be the curvature of these units."""
        if len(self.blocks) != len(units) or len(self.links) not in (0, len(units) - 1):
            raise StateError(
                f"The state's curvature must have a block for each of {len(units)} units, and links "
                f"between all of them or none; got {len(self.blocks)} blocks and {len(self.links)} "
                "links. Load it into the model that it was saved with."
            )
        for block, unit in zip(self.blocks, units, strict=True):
            block.check(unit)
        for link, *pair in zip(self.links, units, units[1:], strict=False):
            if link is not None:
                link.check(*pair)

    def of_units(self, numbers: Sequence[int]) -> "Curvature":
        """That of some units; links between neighbours of which one is missing are left out."""
        links: tuple[Link | None, ...] = ()
        if self.links:
            links = tuple(
                self.links[n] if n + 1 == following else None for n, following in pairwise(numbers)
            )
        return replace(self, blocks=tuple(self.blocks[n] for n in numbers), links=links)

    def mean(self) -> float:
        """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 if that is 0 or not finite."""
        # One synchronisation for all units.
        trace = float(torch.stack([block.trace() for block in self.blocks]).sum())
        mean = trace / sum(block.size for block in self.blocks)
        return mean if 0 < mean < math.inf else 1.0

    def sampling_error(self) -> float:
        """The damping of A ⊗ G that makes up for its having been estimated from n examples.

        The inverse of a second moment of d features is too large on average, by a share of about d/n of
        what it should be. Adding tr(A)/n to the eigenvalues of A, whose mean is tr(A)/d, makes up for
        that. With tr(G)/n for G the product of what is added is

            tr(A) tr(G) / n²,

        here as a mean over all parameters whose block has such factors (`Moments.factor_traces`).
        """
        pairs = [(block.factor_traces(), block.size) for block in self.blocks]
        factored = [(traces, size) for traces, size in pairs if traces is not None]
        if not factored:
            return 0.0
        sizes = [size for _, size in factored]
        weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        mean = torch.stack([traces for traces, _ in factored]).cpu() @ weights
        return float(mean) / self.examples**2


def ema_decay(iteration: int, ceiling: float | None = None, memory: float = 1.0) -> float:
    """ε = min(1 − 1/k, ceiling) [MG15 §5]: a plain average at first, then an exponential one.

    Without a ceiling it is the paper's, or as long a memory as momentum may have if that is longer.
    """
    if ceiling is None:
        ceiling = max(CEILING, 1 - 1 / memory)
    return min(1 - 1 / iteration, ceiling)


class Chains:
    """Cross moments of neighbouring units."""

    def __init__(
        self, blocks: Sequence[Block], links: Sequence[bool], old: Curvature | None, decay: float
    ) -> None:
        self._blocks = blocks
        self._products: list[tuple[Product, Product] | None] = []
        for i, linked in enumerate(links):
            before = old.links[i] if old is not None and old.links else None
            self._products.append(
                (
                    Product(None if before is None else before.A_next, decay),
                    Product(None if before is None else before.G_next, decay),
                )
                if linked
                else None
            )

    def add(self, taps: Sequence[Taps], first: bool, share: float, weight: float) -> None:
        """Add what one backward pass shows."""
        if not any(self._products):
            return
        rows = [self._rows(i, unit) for i, unit in enumerate(taps)]
        for i, products in enumerate(self._products):
            here, there = rows[i], rows[i + 1]
            if products is None or here is None or there is None:
                continue
            if first:
                products[0].add(here[0], there[0], share / len(here[0]))
            products[1].add(here[1], there[1], weight)

    def _rows(self, number: int, taps: Taps) -> tuple[Rows, Tensor] | None:
        block = self._blocks[number]
        if isinstance(taps, SummedGradient) or not taps or not isinstance(block, KroneckerBlock):
            return None
        a, g = block.rows(direct_or_transposed(taps))
        return a[0], g[0]

    def parts(self) -> list[Part]:
        """All sums, to be summed over ranks."""
        return [(side.sum, False) for pair in self._products if pair is not None for side in pair]

    def value(self) -> tuple[Link | None, ...]:
        """The averages with everything that was added."""
        return tuple(
            None if products is None else Link(products[0].value(), products[1].value())
            for products in self._products
        )
