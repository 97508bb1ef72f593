"""γ by trial, as the paper has it [MG15 §6.6]."""

import math
from dataclasses import dataclass
from typing import Literal

from kronfac.control.base import PACE, Measurement
from kronfac.control.gamma_rule import GammaRule, GammaState, tied_gamma

FLOOR = 1e-4
"""Smallest γ without weight decay, which gives no natural floor: it keeps the damped factors of ordinary
networks within reach of a float32 Cholesky decomposition."""


@dataclass(frozen=True)
class GammaSearch(GammaRule[GammaState]):
    """Every `interval` iterations the best of γ, ω₂γ and γ/ω₂; ω₂ = factor^interval.

    Starts at √(λ + η).

    Args:
        interval: T₂, a multiple of the inverse interval T₃.
        factor: per iteration; the paper's is √(19/20).
        minimum: the smallest γ that is tried; None for √η, or 1e-4 if that is larger.
        maximum: the largest one that is tried. The authors' program has 1, which also means that a
            larger γ is compared with 1 instead of γ/ω₂.
        criterion: what the best has lowest, `"model"` for M(δ) or `"objective"` for h(θ + δ), which costs
            one forward pass per candidate.
    """

    interval: int = 20
    factor: float = PACE**0.5
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

    def init(self, m: Measurement) -> GammaState:
        return GammaState(max(tied_gamma(m), self._minimum(m.weight_decay)))

    def candidates(self, state: GammaState, m: Measurement) -> tuple[float, ...]:
        gamma = state.gamma
        if m.iteration % self.interval:
            return (gamma,)
        omega = self.factor**self.interval
        smaller = max(omega * gamma, self._minimum(m.weight_decay))
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
