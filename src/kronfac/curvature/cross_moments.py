"""Cross moments of neighbouring units in a chain, while they are being made [MG15 §4.3]."""

from collections.abc import Sequence

from torch import Tensor

from kronfac.curvature.base import Block
from kronfac.curvature.curvature import Curvature, Link
from kronfac.curvature.kronecker import KroneckerBlock, Product, direct_or_transposed
from kronfac.curvature.taps import Rows, SummedGradient, Taps
from kronfac.distributed import Part


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
        return [Part(side.sum) for pair in self._products if pair is not None for side in pair]

    def value(self) -> tuple[Link | None, ...]:
        """The averages with everything that was added."""
        return tuple(
            None if products is None else Link(products[0].value(), products[1].value())
            for products in self._products
        )
