"""The update as it is, without re-scaling."""

from dataclasses import dataclass

from kronfac.control.base import Measurement
from kronfac.control.quadratic_form import Coefficients, Matrix, model_change
from kronfac.control.step_rule import Step, StepRule, StepState


@dataclass(frozen=True)
class RawStep(StepRule):
    """δ = αΔ with a fixed α: no re-scaling, no momentum, as methods before K-FAC did.

    M(δ) is computed all the same, for ρ and for the choice of γ.
    """

    alpha: float = 1.0

    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        return Step((self.alpha,), model_change(Q, r, (self.alpha,)))
