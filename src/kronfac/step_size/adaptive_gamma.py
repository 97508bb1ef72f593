"""γ by one trial a refresh, near or far as the last ones told; kronfac's own way to [MG15 §6.6]."""

import math
from dataclasses import dataclass
from typing import Literal

from kronfac.step_size.gamma_search import FLOOR

_FIRST_MOVE = -math.log(2)
_LONGEST, _SHORTEST = math.log(20), math.log(1.2)


@dataclass(frozen=True)
class AdaptiveGamma:
    """At every refresh the better of γ and one other value, by M(δ).

    The other value is γ eᵐ. If it is better the next try goes further the same way, m ← 3/2 m; if not,
    less far the other way, m ← −m/2, and from the shortest move on with the first one again. So the
    search costs one extra refresh, and finds a γ that is decades away in a few of them.

    γ is to follow λ where λ moves fast: after a change by more than `drift` the inverse is refreshed at
    once, and √(λ + η) is the other value.

    M on a mini-batch rewards what fits its noise, and so ever smaller γ. Where the next mini-batches
    confirm less than `trusted` of what M predicts, γ stays.

    Args:
        drift: the factor.
        trusted: the share.
        minimum: the smallest γ that is tried; None for √η, or 1e-4 where that is smaller.
    """

    drift: float = 10.0
    trusted: float = 0.5
    minimum: float | None = None
    criterion: Literal["model"] = "model"

    def __post_init__(self) -> None:
        if not self.drift > 1:
            raise ValueError(f"AdaptiveGamma's drift is a factor above 1; got {self.drift}.")
        if not 0 <= self.trusted <= 1:
            raise ValueError(f"AdaptiveGamma's trusted lies in [0, 1]; got {self.trusted}.")
        if self.minimum is not None and not 0 < self.minimum < math.inf:
            raise ValueError(
                f"AdaptiveGamma's minimum is positive and finite, or None; got {self.minimum}."
            )

    def initial(self, lambda_: float, weight_decay: float) -> float:
        return max(math.sqrt(lambda_ + weight_decay), self._minimum(weight_decay))

    def candidates(
        self,
        iteration: int,
        gamma: float,
        lambda_: float,
        weight_decay: float,
        move: float,
        drifted: bool,
        confirmed: float,
    ) -> tuple[float, ...]:
        if iteration == 1 or (confirmed < self.trusted and not drifted):
            return (gamma,)
        other = gamma * math.exp(move or _FIRST_MOVE)
        if drifted:
            other = math.sqrt(lambda_ + weight_decay)
        other = max(other, self._minimum(weight_decay))
        return tuple(dict.fromkeys((gamma, other)))

    def moved(self, move: float, candidates: tuple[float, ...], chosen: float) -> float:
        if len(candidates) < 2:
            return -_FIRST_MOVE if move < 0 else _FIRST_MOVE
        gamma, other = candidates
        tried = math.log(other / gamma)
        if chosen == other:
            return math.copysign(min(1.5 * abs(tried), _LONGEST), tried)
        if abs(tried) < 2 * _SHORTEST:
            return math.copysign(_FIRST_MOVE, -tried)
        return -tried / 2

    def due(self, inverse_lambda: float, lambda_: float) -> bool:
        if inverse_lambda == 0 or lambda_ == 0:
            return inverse_lambda != lambda_
        return abs(math.log(lambda_ / inverse_lambda)) > math.log(self.drift)

    def check_interval(self, inverse_interval: int | None) -> None:
        pass

    def _minimum(self, weight_decay: float) -> float:
        if self.minimum is not None:
            return self.minimum
        return max(math.sqrt(weight_decay), FLOOR)
