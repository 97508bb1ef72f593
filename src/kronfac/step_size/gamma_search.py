"""γ, the damping strength of the approximate Fisher, apart from λ [MG15 §6.6]."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from kronfac.factors import KroneckerFactors

# With no weight decay there is no natural floor for γ. This one keeps the damped factors of ordinary
# networks within reach of a float32 Cholesky decomposition.
FLOOR = 1e-4


@dataclass(frozen=True)
class Past:
    """What a rule may want to know besides γ, λ and η."""

    move: float = 0.0
    """What `moved` returned at the refresh before; 0 at the first."""
    elapsed: int = 1
    """Iterations since that refresh."""
    drifted: bool = False
    """Whether `due` made this refresh."""
    confirmed: float = 1.0
    """What part of M's predictions the next mini-batches confirmed of late; 1 where that is not known."""
    factors: KroneckerFactors | None = None
    """That the inverse is refreshed from."""
    case_weight: float = 1.0
    """c that multiplies the Fisher of an average case: γ² has its units."""


_NOTHING = Past()


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
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float, past: Past
    ) -> tuple[float, ...]:
        """The γ to try where the inverse is refreshed, γ as it was first."""
        ...

    def moved(self, move: float, candidates: tuple[float, ...], chosen: float) -> float:
        """What the rule wants to know of this refresh at the next."""
        ...

    def due(self, inverse_lambda: float, lambda_: float) -> bool:
        """Whether λ is so far from what it was at the last refresh that another can't wait."""
        ...

    def check_interval(self, inverse_interval: int | None) -> None:
        """Refuse an inverse interval T₃ that this rule can't work with; None is one that grows."""
        ...


class _Regular:
    """A rule that remembers nothing and leaves refreshes to their interval."""

    def moved(self, move: float, candidates: tuple[float, ...], chosen: float) -> float:
        return 0.0

    def due(self, inverse_lambda: float, lambda_: float) -> bool:
        return False


@dataclass(frozen=True)
class GammaSearch(_Regular):
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
        if not 0 < (FLOOR if self.minimum is None else self.minimum) <= self.maximum:
            raise ValueError(
                f"GammaSearch needs 0 < minimum ≤ maximum (minimum None is at least {FLOOR}); got "
                f"{self.minimum} and {self.maximum}."
            )
        if self.criterion not in ("model", "objective"):
            raise ValueError(
                f"GammaSearch's criterion is 'model' or 'objective'; got {self.criterion!r}."
            )

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return max(math.sqrt(lambda_ + weight_decay), self._minimum(weight_decay))

    def candidates(
        self,
        iteration: int,
        gamma: float,
        lambda_: float,
        weight_decay: float,
        past: Past = _NOTHING,
    ) -> tuple[float, ...]:
        if iteration % self.interval:
            return (gamma,)
        omega = self.factor**self.interval
        smaller = max(omega * gamma, self._minimum(weight_decay))
        larger = min(gamma / omega, self.maximum)
        # γ first: of equals it stays. At a bound two of the three coincide.
        return tuple(dict.fromkeys((gamma, smaller, larger)))

    def check_interval(self, inverse_interval: int | None) -> None:
        if inverse_interval is None or self.interval % inverse_interval:
            raise ValueError(
                f"GammaSearch's interval T₂ must be a multiple of inverse_interval T₃ [MG15 §6.6]; got "
                f"{self.interval} and {inverse_interval}."
            )

    def _minimum(self, weight_decay: float) -> float:
        if self.minimum is not None:
            return self.minimum
        return max(math.sqrt(weight_decay), FLOOR)


@dataclass(frozen=True)
class FixedGamma(_Regular):
    """γ stays as it is; without a value, as √(λ₀ + η)."""

    gamma: float | None = None
    criterion: Literal["model"] = "model"

    def __post_init__(self) -> None:
        if self.gamma is not None and not 0 <= self.gamma < math.inf:
            raise ValueError(f"γ is finite and not negative; got {self.gamma}.")

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return math.sqrt(lambda_ + weight_decay) if self.gamma is None else self.gamma

    def candidates(
        self,
        iteration: int,
        gamma: float,
        lambda_: float,
        weight_decay: float,
        past: Past = _NOTHING,
    ) -> tuple[float, ...]:
        return (gamma,)

    def check_interval(self, inverse_interval: int | None) -> None:
        pass


@dataclass(frozen=True)
class TiedGamma(_Regular):
    """γ = √(λ + η): one damping strength for both, as in §6.3 before §6.6 separates them.

    Takes effect where the inverse is refreshed.
    """

    criterion: Literal["model"] = "model"

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return math.sqrt(lambda_ + weight_decay)

    def candidates(
        self,
        iteration: int,
        gamma: float,
        lambda_: float,
        weight_decay: float,
        past: Past = _NOTHING,
    ) -> tuple[float, ...]:
        return (math.sqrt(lambda_ + weight_decay),)

    def check_interval(self, inverse_interval: int | None) -> None:
        pass
