"""Which distribution the targets behind G come from [MG15 §5].

- `SampledFisher`: drawn from the model's own predictive distribution, the paper's choice; a backward
  pass a draw.
- `ExactFisher`: the expectation over that distribution, in closed form; a backward pass an output.
- `EmpiricalFisher`: the training targets. Not the Fisher, and said to work worse; one backward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.errors import ClosureError
from kronfac.objective import Likelihood


@dataclass(frozen=True, kw_only=True)
class Fisher(ABC):
    """How the output-space vectors are chosen that are propagated back into G."""

    ema_decay: float | None = None
    """Ceiling of the moving average's decay ε = min(1 − 1/k, ceiling) [MG15 §5]; None for the paper's 0.95,
    or 1 − 1/h where momentum may remember more than 20 steps, h of them (`LongMemory`)."""
    seed: int = 0
    """Of the generator that the targets are drawn with."""

    def __post_init__(self) -> None:
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay lies in [0, 1), or is None; got {self.ema_decay}.")

    def noise(
        self,
        likelihood: Likelihood,
        outputs: torch.Size,
        like: Tensor,
        generator: torch.Generator,
    ) -> Tensor | None:
        """The random numbers for all of S₁, (draws, cases, …), where any are needed."""
        return None

    @abstractmethod
    def vectors(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, noise: Tensor | None
    ) -> Iterator[Tensor]:
        """Vectors v (cases, outputs) in output space whose outer products average to F_R."""

    @property
    def draws(self) -> int:
        """By how many the sum over `vectors` is divided."""
        return 1


@dataclass(frozen=True, kw_only=True)
class SampledFisher(Fisher):
    """Targets sampled from the model, once a case or several times."""

    samples: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise ValueError(f"SampledFisher needs at least one sample; got {self.samples}.")

    def noise(
        self,
        likelihood: Likelihood,
        outputs: torch.Size,
        like: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        return likelihood.noise(self.samples, outputs, like, generator)

    def vectors(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, noise: Tensor | None
    ) -> Iterator[Tensor]:
        assert noise is not None
        for draw in noise:
            yield likelihood.sampled_score(outputs, draw)

    @property
    def draws(self) -> int:
        return self.samples


@dataclass(frozen=True, kw_only=True)
class ExactFisher(Fisher):
    """The expectation over the model's targets: as many backward passes as there are outputs."""

    def vectors(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, noise: Tensor | None
    ) -> Iterator[Tensor]:
        return likelihood.fisher_root_columns(outputs)


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(Fisher):
    """The training targets instead of the model's: second moments of the loss gradients."""

    def vectors(
        self, likelihood: Likelihood, outputs: Tensor, targets: Tensor | None, noise: Tensor | None
    ) -> Iterator[Tensor]:
        if targets is None:
            raise ClosureError(
                "The empirical Fisher needs the training targets, but the closure did not call the "
                "loss module that KFAC was given with the model's outputs. Call it, or use "
                "fisher='sampled'."
            )
        yield likelihood.score(outputs, targets)
