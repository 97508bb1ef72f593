"""The targets whose gradients G is made of [MG15 §5].

- `SampledFisher`: drawn from the model's own predictive distribution, the paper's choice; one backward pass
  per draw.
- `ExactFisher`: the expectation over that distribution, in closed form; one backward pass per output of an
  example.
- `EmpiricalFisher`: the training targets. It is not the Fisher, and is said to work worse; one backward
  pass.

A term's random numbers follow from its number among the terms of all ranks (`Draws`). So a step depends
neither on the division into micro-batches nor on the number of ranks.
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
    """How the vectors in output space are chosen that backward passes start from."""

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
        """The random numbers for `count` such terms, (draws, count, …); None if none are needed."""
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
                # The terms of an example are independent: each has a backward pass of its own.
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
    """The random numbers of all ranks' terms, (draws, terms, …), drawn when they are needed.

    They are drawn in blocks of `BLOCK` terms. A single block comes from the generator itself. Of several
    blocks, each has its own generator, seeded by one number from the given generator and by the block's
    number. So a rank draws only the blocks of its own terms, and the given generator stays the same on all
    ranks.

    Args:
        draw: from a number of terms and a generator to their numbers; None if none are needed.
        count: the number of terms on all ranks.
        generator: in the same state on all ranks.
    """

    def __init__(
        self,
        draw: Callable[..., Tensor | None],
        count: int,
        generator: torch.Generator,
    ) -> None:
        self._draw, self._count, self._device = draw, count, generator.device
        self._number, self._block = -1, None  # the last block that was drawn
        if count <= BLOCK:
            self._number, self._block = 0, draw(count=count, generator=generator)
        else:
            self._seed = draw_seed(generator)

    def between(self, start: int, stop: int) -> Tensor | None:
        """The numbers of the terms from `start` to before `stop`; quickest in ascending order."""
        found: list[Tensor] = []
        for number in range(start // BLOCK, max(stop - 1, start) // BLOCK + 1):
            block, offset = self._of(number), number * BLOCK
            if block is None:
                return None
            found.append(block[:, max(start - offset, 0) : stop - offset])
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _of(self, number: int) -> Tensor | None:
        if number != self._number:
            seeded = torch.Generator(self._device).manual_seed(child_seed(self._seed, number))
            count = min(BLOCK, self._count - number * BLOCK)
            self._block = self._draw(count=count, generator=seeded)
            self._number = number
        return self._block


def draw_seed(generator: torch.Generator) -> int:
    """A seed from a stream of random numbers."""
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def child_seed(seed: int, number: int) -> int:
    """Derive a seed in [0, 2⁶³): SplitMix64 after `number` states (Steele, Lea, Flood 2014).

    Seeds of neighbouring numbers differ in half of their bits: torch's CPU generator uses only 32 of them.
    """
    z = (seed + (number + 1) * _STEP) % _WORD
    z = (z ^ (z >> 30)) * _MIX[0] % _WORD
    z = (z ^ (z >> 27)) * _MIX[1] % _WORD
    return (z ^ (z >> 31)) >> 1


def with_signs(
    vectors: Tensor, seed: int, key: tuple[int, int], place: tuple[int, int, int]
) -> Tensor:
    """The vectors with a random sign for every example, by its number among the examples of all ranks.

    Args:
        vectors: for the terms of some examples, (terms, event).
        seed: the same on all ranks.
        key: the numbers of the vector and of the loss call.
        place: the number of these examples, the number on all ranks, and the number of the first.
    """
    count, total, start = place
    seed = child_seed(child_seed(seed, key[0]), key[1])
    generator = torch.Generator(vectors.device).manual_seed(seed)
    bits = Draws(_bits, total, generator).between(start, start + count)
    assert bits is not None
    signs, each = (2 * bits[0] - 1).to(vectors.dtype), len(vectors) // count
    return vectors * signs.repeat_interleave(each).unsqueeze(-1)


def _bits(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (1, count), generator=generator, device=generator.device)
