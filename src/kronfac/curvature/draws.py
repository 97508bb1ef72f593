"""Random numbers by the number of a term among those of all ranks.

Terms go in blocks of `BLOCK`. If there is one block, its numbers are those of the generator's own stream.
If there are several, each has a generator of its own, seeded by a number from the stream and by the block's
place. So a rank draws the blocks that its terms are in and no others; what a term gets depends neither on
the rank that has it nor on the micro-batch that it is in; and the stream goes on alike on all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 1024
"""Terms whose numbers are drawn at once."""

_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws:
    """The random numbers of `count` terms on all ranks, (draws, terms, …), made as they are asked for.

    Args:
        draw: numbers for so many terms, from this generator; None if none are needed.
        count: of the terms.
        generator: the stream, which goes on by the same amount on every rank.
    """

    def __init__(
        self,
        draw: Callable[[int, torch.Generator], Tensor | None],
        count: int,
        generator: torch.Generator,
    ) -> None:
        self._draw, self._count, self._device = draw, count, generator.device
        self._number, self._block = -1, None  # the last block that was asked for
        if count <= BLOCK:
            self._number, self._block = 0, draw(count, generator)
        else:
            self._seed = draw_seed(generator)

    def between(self, start: int, stop: int) -> Tensor | None:
        """The numbers of the terms from `start` to before `stop`; quickest in ascending order."""
        first, last = start // BLOCK, max(stop - 1, start) // BLOCK
        if first == last:
            block = self._of(first)
            offset = first * BLOCK
            return None if block is None else block[:, start - offset : stop - offset]
        found: Tensor | None = None
        for number in range(first, last + 1):
            block = self._of(number)
            if block is None:
                return None
            if found is None:
                found = block.new_empty((len(block), stop - start, *block.shape[2:]))
            offset = number * BLOCK
            lower, upper = max(start, offset), min(stop, offset + BLOCK)
            found[:, lower - start : upper - start] = block[:, lower - offset : upper - offset]
        return found

    def _of(self, number: int) -> Tensor | None:
        if number != self._number:
            seeded = torch.Generator(self._device).manual_seed(child_seed(self._seed, number))
            self._block = self._draw(min(BLOCK, self._count - number * BLOCK), seeded)
            self._number = number
        return self._block


def draw_seed(generator: torch.Generator) -> int:
    """A seed from a stream of random numbers."""
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def child_seed(seed: int, number: int) -> int:
    """One of many seeds from one, in [0, 2⁶³): SplitMix64 after `number` states (Steele, Lea, Flood 2014).

    Neighbouring seeds differ in half of their bits: torch's generator on the host is seeded by 32 of them.
    """
    z = (seed + (number + 1) * _STEP) % _WORD
    z = (z ^ (z >> 30)) * _MIX[0] % _WORD
    z = (z ^ (z >> 27)) * _MIX[1] % _WORD
    return (z ^ (z >> 31)) >> 1
