"""The targets whose gradients G is made of [MG15 §5].

- `SampledFisher`: drawn from the model's own predictive distribution, the paper's choice; one backward pass
  per draw.
- `ExactFisher`: the expectation over that distribution, in closed form; one backward pass per output of an
  example.
- `EmpiricalFisher`: the training targets. It is not the Fisher, and is said to work worse; one backward
  pass.

Random numbers are drawn for the terms of all ranks at once, so that a step depends neither on the division
into micro-batches nor on the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
