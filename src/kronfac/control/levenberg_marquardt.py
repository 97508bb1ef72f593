"""λ by how well the quadratic model predicted the objective [MG15 §6.5]."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from kronfac.control.base import PACE, Measurement
from kronfac.control.damping_rule import DampingRule, DampingState, check_lambda

GOOD, POOR = 3 / 4, 1 / 4
"""ρ above which λ falls and below which it rises [MG15 §6.5]."""


@dataclass(frozen=True)
class LevenbergMarquardt(DampingRule[DampingState]):
    """Every `interval` iterations: λ ← ω₁ λ if ρ > ¾, λ ← λ/ω₁ if ρ < ¼ or NaN; ω₁ = decay^interval.

    ρ is measured on the step's own mini-batch. A step that is rejected counts as ρ = NaN.

    Args:
        lambda_: the first λ, in the units of the objective's curvature.
        interval: T₁.
        decay: per iteration, so that λ falls at the same pace whatever the interval. The paper's is
            19/20.
    """

    lambda_: float = 1.0
    interval: int = 5
    decay: float = PACE

    def __post_init__(self) -> None:
        check_lambda(self.lambda_)
        if self.interval < 1:
            raise ValueError(f"LevenbergMarquardt's interval is 1 or more; got {self.interval}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"LevenbergMarquardt's decay lies in (0, 1]; got {self.decay}.")

    def init(self, m: Measurement) -> DampingState:
        return DampingState(self.lambda_)

    def measures(self, iteration: int) -> Literal["own", "next"] | None:
        return "own" if iteration % self.interval == 0 else None

    def update(self, state: DampingState, m: Measurement) -> DampingState:
        rho = math.nan if m.rejected else m.rho if m.next_rho is None else m.next_rho
        if rho is None or m.invisible:
            return state
        omega = self.decay**self.interval
        if math.isnan(rho) or rho < POOR:
            return replace(state, lambda_=state.lambda_ / omega)
        return replace(state, lambda_=state.lambda_ * omega) if rho > GOOD else state
