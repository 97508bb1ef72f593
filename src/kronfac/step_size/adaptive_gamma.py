"""γ by how sure the factors are, or by trial where that tells; kronfac's own way to [MG15 §6.6]."""

import math
from dataclasses import dataclass
from typing import Literal

from kronfac.factors import sampling_error
from kronfac.step_size.gamma_search import FLOOR, Past

_LONGEST = 4.0
_LATEST = 1000
"""Iterations since the last refresh that count for how far γ moves: powers of more are no numbers."""
LEAST = 1e-3
"""γ by the sampling error is not smaller: a network that fits all its cases has next to no curvature, and
steps from mini-batches there throw out single cases that are not among them."""
FIRST_ITERATIONS = 20
"""In which the moving averages fill up: they then forget at a rate of 1/20 or less."""


@dataclass(frozen=True)
class AdaptiveGamma:
    """As M(δ) says where M is to be trusted; elsewhere as large as the factors' sampling error.

    M on a mini-batch rewards what fits its noise, and so ever smaller γ. Where mini-batches differ and
    the next ones confirm less than `trusted` of what M predicts,

        γ² = strength² · mean of tr(A) tr(G) / n²,

    the mean being what makes up for the moving averages' being worth n cases and no more (see
    `sampling_error`). In the first iterations, where that is few, γ does not rise by it.

    Where M is trusted, the better of γ and one other value is taken at every refresh, by M(δ). The other
    one is γ · factor^(m n), n iterations after the last refresh; m starts as 1, which is the paper's
    pace. If the other value is better the next try goes faster the same way, m ← 3/2 m up to 4; if not,
    the other way, m ← ∓1. So the search costs one extra refresh, and still covers decades.

    γ is to follow λ where λ moves fast: after a change by more than `drift` the inverse is refreshed at
    once, and √(λ + η) is the other value.

    Args:
        strength: of γ in units of the sampling error's root.
        factor: per iteration; the paper's √(19/20) [MG15 §6.6].
        drift: the factor.
        trusted: the share.
        minimum: the smallest γ that is tried; None for √η, or where that is smaller for 1e-4, and by the
            sampling error for 1e-3 in units of the likelihood.
    """

    strength: float = 2.5
    factor: float = (19 / 20) ** 0.5
    drift: float = 10.0
    trusted: float = 0.5
    minimum: float | None = None
    criterion: Literal["model"] = "model"

    def __post_init__(self) -> None:
        if not 0 < self.strength < math.inf:
            raise ValueError(
                f"AdaptiveGamma's strength is positive and finite; got {self.strength}."
            )
        if not 0 < self.factor < 1:
            raise ValueError(f"AdaptiveGamma's factor lies in (0, 1); got {self.factor}.")
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
        self, iteration: int, gamma: float, lambda_: float, weight_decay: float, past: Past
    ) -> tuple[float, ...]:
        if iteration == 1:
            return (gamma,)
        if past.confirmed < self.trusted and past.factors is not None:
            sure = self.strength * math.sqrt(sampling_error(past.factors))
            least = self._minimum(weight_decay)
            if self.minimum is None:
                least = max(least, LEAST * math.sqrt(past.case_weight))
            sure = max(sure, least)
            return (min(sure, gamma) if iteration <= FIRST_ITERATIONS else sure,)
        elapsed = min(past.elapsed, _LATEST)
        other = gamma * self.factor ** ((past.move or 1.0) * elapsed)
        if past.drifted:
            other = math.sqrt(lambda_ + weight_decay)
        other = max(other, self._minimum(weight_decay))
        if other == gamma:  # at the floor, from where there is only up
            other = gamma / self.factor**elapsed
        return gamma, other

    def moved(self, move: float, candidates: tuple[float, ...], chosen: float) -> float:
        move = move or 1.0
        if len(candidates) < 2:
            return move  # nothing was tried
        tried = 1.0 if candidates[1] < candidates[0] else -1.0
        if chosen != candidates[1]:
            return -tried
        return tried * min(1.5 * abs(move), _LONGEST)

    def due(self, inverse_lambda: float, lambda_: float) -> bool:
        if inverse_lambda == 0 or lambda_ == 0:
            return inverse_lambda != lambda_
        # More: a step that was taken back moves λ by 10, for a while, and γ would not come back.
        return abs(math.log(lambda_ / inverse_lambda)) > math.log(self.drift) + 1e-9

    def check_interval(self, inverse_interval: int | None) -> None:
        pass

    def _minimum(self, weight_decay: float) -> float:
        if self.minimum is not None:
            return self.minimum
        return max(math.sqrt(weight_decay), FLOOR)
