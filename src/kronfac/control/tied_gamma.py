"""γ that follows λ [MG15 §6.3]."""

from dataclasses import dataclass

from kronfac.control.base import Measurement
from kronfac.control.gamma_rule import GammaRule, GammaState, tied_gamma


@dataclass(frozen=True)
class TiedGamma(GammaRule[GammaState]):
    """γ = √(λ + η): one damping strength for both, as in §6.3 before §6.6 separates them.

    Takes effect when the inverse is refreshed.
    """

    def init(self, m: Measurement) -> GammaState:
        return GammaState(tied_gamma(m))

    def candidates(self, state: GammaState, m: Measurement) -> tuple[float, ...]:
        return (tied_gamma(m),)
