"""γ that is given."""

import math
from dataclasses import dataclass

from kronfac.control.base import Measurement
from kronfac.control.gamma_rule import GammaRule, GammaState, tied_gamma


@dataclass(frozen=True)
class FixedGamma(GammaRule[GammaState]):
    """γ stays as it is; without a value, as √(λ₀ + η)."""

    gamma: float | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None and not 0 <= self.gamma < math.inf:
            raise ValueError(f"γ is finite and not negative; got {self.gamma}.")

    def init(self, m: Measurement) -> GammaState:
        return GammaState(tied_gamma(m) if self.gamma is None else self.gamma)

    def candidates(self, state: GammaState, m: Measurement) -> tuple[float, ...]:
        return (state.gamma,)
