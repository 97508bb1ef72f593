"""Units that show no more than their gradient summed over the examples, V = Σ_n g_n, of which V² is taken.

The square is unbiased if products of different examples vanish on average. They do if targets are drawn for
each term; else every example gets a random sign. It is taken of the sum over all passes and ranks, so that
it does not matter how the examples are divided.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.curvature.base import Average
from kronfac.curvature.draws import Draws, child_seed, draw_seed
from kronfac.curvature.taps import SummedGradient
from kronfac.distributed import Part, Phase, Ranks


class SummedGradients:
    """√w V of such units, one for every vector that is propagated back, summed over passes."""

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, unit: int, vector: int, V: Tensor, weight: float) -> None:
        """Add the gradient of a unit in one pass.

        Args:
            unit: its number.
            vector: the number of the vector that it is of.
            V: the gradient.
            weight: what V² counts.
        """
        held, scaled = self._held[unit], V * abs(weight) ** 0.5
        if vector < len(held):
            held[vector] = held[vector] + scaled
        else:
            held.append(scaled)

    def add_to(self, averages: Sequence[Average], met: list[bool], world: Ranks) -> None:
        """Add what all passes and ranks have shown to the averages, and note that these were met."""
        for n, V in self.total(world):
            averages[n].add(SummedGradient(V), not met[n], 1.0, 1.0)
            met[n] = True

    def total(self, world: Ranks) -> list[tuple[int, Tensor]]:
        """Numbers of units and their gradients, of all passes and ranks; all of them on rank 0.

        What is made of them is summed over the ranks once more. All ranks have the same units.
        """
        units = sorted(self._held)
        if units and world.size > 1:
            rows = world.gather(Phase.STATISTICS, [float(len(self._held[n])) for n in units])
            for n, lengths in zip(units, zip(*rows, strict=True), strict=True):
                held = self._held[n]  # an example may have less outputs on one rank than on another
                held += [torch.zeros_like(held[0]) for _ in range(int(max(lengths)) - len(held))]
            world.sum_(Phase.STATISTICS, [Part(V) for n in units for V in self._held[n]])
        return [(n, V) for n in units for V in self._held[n]] if world.rank == 0 else []


class Signs:
    """A random sign for every example and vector, by the number of the example among those of all ranks.

    Products of different examples, which the square of a summed gradient has in it, then vanish on average,
    as they do by themselves if targets are drawn; products within an example stay as they are.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._seed, self._device = draw_seed(generator), generator.device

    def times(
        self,
        vectors: Tensor,
        key: tuple[int, int],
        place: tuple[int, int, int],
        interleaved: bool,
    ) -> Tensor:
        """The vectors, with their signs.

        Args:
            vectors: of the terms of some examples, (terms, event).
            key: the numbers of the vector and of the loss call.
            place: how many examples these are, how many all ranks have, and the number of the first.
            interleaved: whether term k N + n is of example n of N; else those of one stand together.
        """
        count, total, start = place
        seed = child_seed(child_seed(self._seed, key[0]), key[1])
        generator = torch.Generator(self._device).manual_seed(seed)
        draws = Draws(self._draw, total, generator).between(start, start + count)
        assert draws is not None
        drawn, each = (2 * draws[0] - 1).to(vectors.dtype), len(vectors) // count
        signs = drawn.repeat(each) if interleaved else drawn.repeat_interleave(each)
        return vectors * signs.unsqueeze(-1)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, (1, count), generator=generator, device=self._device)
