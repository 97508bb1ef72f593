"""λ that is given."""

from dataclasses import dataclass

from kronfac.control.base import Measurement
from kronfac.control.damping_rule import DampingRule, DampingState, check_lambda


@dataclass(frozen=True)
class FixedDamping(DampingRule[DampingState]):
    """λ stays as it is."""

    lambda_: float

    def __post_init__(self) -> None:
        check_lambda(self.lambda_)

    def init(self, m: Measurement) -> DampingState:
        return DampingState(self.lambda_)
