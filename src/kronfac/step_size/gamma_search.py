"""γ, the damping strength of the approximate Fisher, apart from λ [MG15 §6.6]."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

# With no weight decay there is no natural floor for γ. This one keeps the damped factors of ordinary
# networks within reach of a float32 Cholesky decomposition.
_FLOOR = 1e-4


class GammaRule(Protocol):
    """How γ starts and moves."""

    @property
    def criterion(self) -> Literal["model", "objective"]:
        """What the best of several candidates has lowest: M(δ) or h(θ + δ)."""
        ...

    def initial(self, lambda_: float, weight_decay: float) -> float:
        """γ before the first iteration."""
        ...

    def candidates(
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float
    ) -> tuple[float, ...]:
        """The γ to try at this iteration. More than one only where the inverse is refreshed."""
        ...

    def check_interval(self, inverse_interval: int) -> None:
        """Refuse an inverse interval T₃ that this rule can't work with."""
        ...


@dataclass(frozen=True)
class GammaSearch:
    """Every `interval` iterations the best of γ, ω₂γ and γ/ω₂; ω₂ = factor^interval.

    Starts at √(λ + η).

    Args:
        interval: T₂, a multiple of the inverse interval T₃.
        factor: per iteration; the paper's is √(19/20).
        minimum: the smallest γ that is tried; None for √η, or 1e-4 where that is smaller.
        maximum: the largest one that is tried. The authors' program has 1, which also means that a
            larger γ is compared with 1 instead of γ/ω₂.
        criterion: what is lowest for the best, `"model"` for M(δ) or `"objective"` for h(θ + δ), which
            costs a forward pass a candidate.
    """

    interval: int = 20
    factor: float = (19 / 20) ** 0.5
    minimum: float | None = None
    maximum: float = math.inf
    criterion: Literal["model", "objective"] = "model"

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"GammaSearch's interval is 1 or more; got {self.interval}.")
        if not 0 < self.factor < 1:
            raise ValueError(f"GammaSearch's factor lies in (0, 1); got {self.factor}.")
        if not 0 < (_FLOOR if self.minimum is None else self.minimum) <= self.maximum:
            raise ValueError(
                f"GammaSearch needs 0 < minimum ≤ maximum (minimum None is at least {_FLOOR}); got "
                f"{self.minimum} and {self.maximum}."
            )
        if self.criterion not in ("model", "objective"):
            raise ValueError(
                f"GammaSearch's criterion is 'model' or 'objective'; got {self.criterion!r}."
            )

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return max(math.sqrt(lambda_ + weight_decay), self._minimum(weight_decay))

    def candidates(
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float
    ) -> tuple[float, ...]:
        if iteration % self.interval:
            return (gamma,)
        omega = self.factor**self.interval
        smaller = max(omega * gamma, self._minimum(weight_decay))
        larger = min(gamma / omega, self.maximum)
        # γ first: of equals it stays. At a bound two of the three coincide.
        return tuple(dict.fromkeys((gamma, smaller, larger)))

    def check_interval(self, inverse_interval: int) -> None:
        if self.interval % inverse_interval:
            raise ValueError(
                f"GammaSearch's interval T₂ must be a multiple of inverse_interval T₃ [MG15 §6.6]; got "
                f"{self.interval} and {inverse_interval}."
            )

    def _minimum(self, weight_decay: float) -> float:
        if self.minimum is not None:
            return self.minimum
        return max(math.sqrt(weight_decay), _FLOOR)


@dataclass(frozen=True)
class FixedGamma:
    """γ stays as it is; without a value, as √(λ₀ + η)."""

    gamma: float | None = None
    criterion: Literal["model"] = "model"

    def __post_init__(self) -> None:
        if self.gamma is not None and not 0 <= self.gamma < math.inf:
            raise ValueError(f"γ is finite and not negative; got {self.gamma}.")

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return math.sqrt(lambda_ + weight_decay) if self.gamma is None else self.gamma

    def candidates(
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float
    ) -> tuple[float, ...]:
        return (gamma,)

    def check_interval(self, inverse_interval: int) -> None:
        pass


@dataclass(frozen=True)
class TiedGamma:
    """γ = √(λ + η): one damping strength for both, as in §6.3 before §6.6 separates them.

    Takes effect where the inverse is refreshed.
    """

    criterion: Literal["model"] = "model"

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return math.sqrt(lambda_ + weight_decay)

    def candidates(
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float
    ) -> tuple[float, ...]:
        return (math.sqrt(lambda_ + weight_decay),)

    def check_interval(self, inverse_interval: int) -> None:
        pass
