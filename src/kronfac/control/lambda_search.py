"""The first λ by trial: the least damping at which a step still does what the quadratic model says.

More damping would lower the objective faster at first, along the few steepest directions; training that
starts there is slower for long afterwards.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LambdaSearch:
    """The search for λ₀ on the first mini-batch, by trial steps with γ = √(λ + η).

    Args:
        trusted: ρ of a step that the model describes well enough: between the ¼ and the ¾ of [MG15 §6.5].
        factor: between the λ's of two trials.
        most_trials: trials at the most.
        least_curvature: the smallest λ in units of the mean curvature. By the curvature of the mini-batch
            that it was computed from, a step looks good with any damping; the next ones suffer from too
            little of it.
        below_decay: the smallest λ in units of η. A smaller one damps nothing that η does not.
    """

    trusted: float = 0.6
    factor: float = 10.0
    most_trials: int = 10
    least_curvature: float = 1e-3
    below_decay: float = 0.1

    def floor(self, mean_curvature: float, weight_decay: float) -> float:
        """The smallest λ that is tried."""
        return max(self.least_curvature * mean_curvature, self.below_decay * weight_decay)

    def least_trusted(
        self, rho: Callable[[float], float], start: float, floor: float = 0.0
    ) -> tuple[float, int]:
        """The λ at which ρ falls to `trusted`, and the number of trials.

        Downwards from `start` by `factor` while ρ(λ) is above, upwards until it is; then by interpolation
        in log λ between the last two. At `floor`, and after the last trial, the last λ. A ρ that is NaN
        says nothing: the λ before it.
        """
        trials, x, here = 1, start, rho(start)
        down = here >= self.trusted
        while trials < self.most_trials and not (down and x <= floor):
            following = max(x / self.factor, floor) if down else x * self.factor
            there = rho(following)
            trials += 1
            if math.isnan(here) or math.isnan(there):
                return x, trials
            if (there >= self.trusted) != down:
                above, other = (here, there) if down else (there, here)
                share = (above - self.trusted) / (above - max(other, 0.0))
                larger = max(x, following)
                return larger * (min(x, following) / larger) ** share, trials
            x, here = following, there
        return x, trials
