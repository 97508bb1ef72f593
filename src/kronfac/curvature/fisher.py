"""Which distribution the targets behind G come from [MG15 §5].

- `SampledFisher`: drawn from the model's own predictive distribution, the paper's choice; one backward pass
  per draw.
- `ExactFisher`: the expectation over that distribution, in closed form; one backward pass per output of an
  example.
- `EmpiricalFisher`: the training targets. Not the Fisher, and said to work worse; one backward pass.

Random numbers are drawn by the number of a term, counted over all ranks (`Draws`): a step depends neither
on the division into micro-batches nor on the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.errors import ClosureError
from kronfac.objective import Terms


@dataclass(frozen=True)
class Outputs:
    """The terms of one loss call, with the outputs of the model."""

    terms: Terms
    z: Tensor  # (terms, event)
    noise: Tensor | None = None
    """Random numbers for `draws` targets of each term, (draws, terms, …)."""
    each: int = 1
    """The number of terms of an example."""

    def alone(self, vectors: Tensor, number: int) -> Tensor:
        """Vectors (terms, event) of one term of every example; zeros for the others."""
        if self.each == 1:
            return vectors
        chosen, found = slice(number, None, self.each), torch.zeros_like(vectors)
        found[chosen] = vectors[chosen]
        return found


Vector = Tensor | None
"""Output-space vectors of one loss call, (terms, event); None stands for zeros."""


@dataclass(frozen=True, kw_only=True)
class Fisher(ABC):
    """How the output-space vectors are chosen that are propagated back into G."""

    ema_decay: float | None = None
    """Ceiling of the moving average's decay ε = min(1 − 1/k, ceiling) [MG15 §5]; None for the paper's 0.95,
    or 1 − 1/h if momentum may remember more than 20 steps, h of them (`LongMemory`)."""
    seed: int = 0
    """Seed of the generator that targets are drawn with."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay lies in [0, 1), or is None; got {self.ema_decay}.")

    def noise(
        self, terms: Terms, count: int, like: Tensor, generator: torch.Generator
    ) -> Tensor | None:
        """The random numbers for `count` such terms, (draws, count, …), if any are needed."""
        return None

    @abstractmethod
    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        """Vectors v in output space, one for each loss call, whose outer products average to F_R."""

    independent: ClassVar[bool] = False
    """Whether the vectors of different examples are independent and have mean zero."""

    @property
    def draws(self) -> int:
        """The number that the sum over `vectors` is divided by."""
        return 1


@dataclass(frozen=True, kw_only=True)
class SampledFisher(Fisher):
    """Targets sampled from the model, once per term or several times."""

    independent: ClassVar[bool] = True
    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise ValueError(f"SampledFisher needs at least one sample; got {self.samples}.")

    def noise(self, terms: Terms, count: int, like: Tensor, generator: torch.Generator) -> Tensor:
        shape = torch.Size((count, terms.event))
        return terms.likelihood.noise(self.samples, shape, like, generator)

    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        for draw in range(self.samples):
            scores: list[Vector] = []
            for out in outputs:
                assert out.noise is not None
                scores.append(out.terms.likelihood.sampled_score(out.z, out.noise[draw]))
            yield scores

    @property
    def draws(self) -> int:
        return self.samples


@dataclass(frozen=True, kw_only=True)
class ExactFisher(Fisher):
    """The expectation over the model's targets: as many backward passes as an example has outputs."""

    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        for i, out in enumerate(outputs):
            for column in out.terms.likelihood.fisher_root_columns(out.z):
                # The terms of an example are independent of each other, so none may meet another one.
                for k in range(out.each):
                    alone = out.alone(column, k)
                    yield [alone if j == i else None for j in range(len(outputs))]


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(Fisher):
    """The training targets instead of the model's: second moments of the loss gradients."""

    def vectors(self, outputs: Sequence[Outputs]) -> Iterator[list[Vector]]:
        scores: list[Vector] = []
        for out in outputs:
            if out.terms.targets is None:
                raise ClosureError(
                    "The empirical Fisher needs the training targets, but the closure did not call a "
                    "loss that KFAC knows. Call the loss module that KFAC was given, or pass targets to "
                    "kronfac.observe, or use fisher='sampled'."
                )
            scores.append(out.terms.likelihood.score(out.z, out.terms.targets))
        yield scores


BLOCK = 1024
"""Terms whose numbers are drawn at once."""

_WORD = 2**64
_STEP = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws:
    """The random numbers of `count` terms on all ranks, (draws, terms, …), made when they are needed.

    Terms go in blocks of `BLOCK`. If there is one block, its numbers are those of the generator's own
    stream. If there are several, each has a generator of its own, seeded by a number from the stream and by
    the block's place: a rank draws the blocks that its terms are in and no others, and the stream goes on
    alike on all ranks.

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


class Signs:
    """A random sign for every example and vector, by the number of the example, counted over all ranks."""

    def __init__(self, generator: torch.Generator) -> None:
        self._seed, self._device = draw_seed(generator), generator.device

    def times(self, vectors: Tensor, key: tuple[int, int], place: tuple[int, int, int]) -> Tensor:
        """The vectors, with their signs.

        Args:
            vectors: of the terms of some examples, (terms, event).
            key: the numbers of the vector and of the loss call.
            place: how many examples these are, how many all ranks have, and the number of the first.
        """
        count, total, start = place
        seed = child_seed(child_seed(self._seed, key[0]), key[1])
        generator = torch.Generator(self._device).manual_seed(seed)
        draws = Draws(self._draw, total, generator).between(start, start + count)
        assert draws is not None
        drawn, each = (2 * draws[0] - 1).to(vectors.dtype), len(vectors) // count
        return vectors * drawn.repeat_interleave(each).unsqueeze(-1)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, (1, count), generator=generator, device=self._device)
