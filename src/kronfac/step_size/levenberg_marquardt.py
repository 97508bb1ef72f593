"""λ by how well the quadratic model predicted the objective [MG15 §6.5].

Rules are values: numbers in, numbers out. Iterations are counted from 1.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Verdict:
    """What the next mini-batch says of a step."""

    rho: float
    share: float
    """Of the model's curvature along the step, what is not λ's."""
    noisy: bool
    """Whether ρ has anything to do with the choice of the rows."""
    elapsed: int
    """Iterations since the last verdict."""
    taken_back: bool = False


class DampingRule(Protocol):
    """How λ starts and moves."""

    @property
    def lambda_(self) -> float | None:
        """λ before the first iteration; None only if `searches`."""
        ...

    @property
    def searches(self) -> bool:
        """Whether the first step looks for a better λ, from this one or from one of its own."""
        ...

    def measures(self, iteration: int) -> bool:
        """Whether ρ is wanted at this iteration, which costs a forward pass."""
        ...

    def updated(self, lambda_: float, rho: float) -> float:
        """λ after an iteration that measured ρ."""
        ...

    @property
    def suspects(self) -> bool:
        """Whether a step that was to have no such judgement gets one where the loss jumps."""
        ...

    def judges(self, iteration: int) -> bool:
        """Whether ρ of the step before is wanted on the rows of this iteration, at the same cost."""
        ...

    def judged(self, lambda_: float, verdict: Verdict) -> float:
        """λ after that."""
        ...


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Every `interval` iterations: λ ← ω₁ λ if ρ > ¾, λ ← λ/ω₁ if ρ < ¼ or NaN; ω₁ = decay^interval.

    Args:
        lambda_: the first λ, in the units of the objective's curvature.
        interval: T₁.
        decay: per iteration, so that λ falls at the same pace whatever the interval. The paper's is
            19/20.
    """

    lambda_: float = 1.0
    interval: int = 5
    decay: float = 19 / 20
    searches: ClassVar[bool] = False
    suspects: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lambda(self.lambda_)
        if self.interval < 1:
            raise ValueError(f"LevenbergMarquardt's interval is 1 or more; got {self.interval}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"LevenbergMarquardt's decay lies in (0, 1]; got {self.decay}.")

    def measures(self, iteration: int) -> bool:
        return iteration % self.interval == 0

    def judges(self, iteration: int) -> bool:
        return False

    def judged(self, lambda_: float, verdict: Verdict) -> float:
        return self.updated(lambda_, math.nan if verdict.taken_back else verdict.rho)

    def updated(self, lambda_: float, rho: float) -> float:
        omega = self.decay**self.interval
        if math.isnan(rho) or rho < 1 / 4:
            return lambda_ / omega
        return lambda_ * omega if rho > 3 / 4 else lambda_


@dataclass(frozen=True)
class FixedDamping:
    """λ stays as it is."""

    lambda_: float
    searches: ClassVar[bool] = False
    suspects: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lambda(self.lambda_)

    def measures(self, iteration: int) -> bool:
        return False

    def updated(self, lambda_: float, rho: float) -> float:
        return lambda_

    def judges(self, iteration: int) -> bool:
        return False

    def judged(self, lambda_: float, verdict: Verdict) -> float:
        return lambda_


def _check_lambda(lambda_: float) -> None:
    if not 0 <= lambda_ < math.inf:
        raise ValueError(f"λ is finite and not negative; got {lambda_}.")
