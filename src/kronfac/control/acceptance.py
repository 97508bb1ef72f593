"""Was the last step a good one? Validated on the next mini-batch, from which it was not computed.

θ − δ was evaluated on the step's own mini-batch and is now evaluated on the next one: the difference of the
two losses is the noise of sampling. A step after which the objective is higher by more than twice that is
rejected. Pure functions of numbers; the optimizer rolls back what is rejected.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from kronfac.control.base import ROUNDING, Measurement, ParameterVector, Rule, require
from kronfac.storage import Storable

DECAY = 0.8
"""Decay of the moving averages of ρ and of the noise, per validation."""
NO_NOISE = 1e-2
"""Share of the predicted change below which noise explains nothing of ρ."""
FAMILIAR = 10
"""Iterations after which it is known by how much mini-batches differ."""
VISIBLE = 100.0
"""Times the rounding error of a loss above which it has digits to spare."""
OUTLIER = 8.0
"""Times the noise that one sample of it counts as at most."""


Reason = Literal["noise", "model", "rounding"]
"""Mini-batches differ; the quadratic model failed on the mini-batch that it was made of; or the change of
the loss is near its rounding error."""


@dataclass(frozen=True)
class Kept(Storable):
    """Copies for rolling back the last step to the bit: θ + δ − δ is not θ."""

    theta: ParameterVector
    """θ before the step."""
    momentum: ParameterVector | None
    """The momentum buffer before it."""


@dataclass(frozen=True)
class Pending(Storable):
    """A step that was taken and not yet validated."""

    delta: ParameterVector
    examples: int
    """Examples in its mini-batch."""
    loss: float
    """On its own mini-batch, before it, as the closure returned it."""
    penalty: float
    """η/2 ‖θ‖² before it."""
    predicted_change: float
    curvature_share: float
    kept: Kept | None = None
    """If the next iteration is to validate it."""
    validate: bool = False
    """Whether the next iteration validates it although it is not its turn."""


@dataclass(frozen=True)
class AcceptanceState(Storable):
    """The step to be validated, and what validations found so far."""

    pending: Pending | None = None
    validated: int = 0
    """Iteration of the last step that was validated."""
    confirmed: float | None = None
    """Recent average of the part of M's predictions that the next mini-batch saw come true."""
    noise: float | None = None
    """Recent average of how much the loss differs from one mini-batch to another at the same θ, per example
    if the loss is a sum."""


@dataclass(frozen=True)
class Verdict:
    """What the next mini-batch says of the last step."""

    state: AcceptanceState
    """With nothing left to validate."""
    measurement: Measurement
    rho: float
    """NaN if the loss is not finite after the step, or the step too short to be seen."""
    cause: str | None = None
    """Why the step is rejected; None if it is accepted."""
    reason: Reason = "model"
    """What has caused a rejection."""


@dataclass(frozen=True)
class Acceptance(Rule[AcceptanceState]):
    """When a step is validated out of turn, and when it is rejected.

    Validation in turn is what `DampingRule.measures` asks for.

    Args:
        rejection: times the noise that the objective has to rise for the step to be rejected. A step after
            which the loss is not finite is rejected too. None rejects none.
        suspicion: times the noise that the loss has to be above that of the mini-batch before, for the step
            between them to be validated out of turn; two mini-batches at the same θ differ by more about
            once in a thousand times. None for validation in turn alone.
    """

    rejection: float | None = 2.0
    suspicion: float | None = 4.0

    def __post_init__(self) -> None:
        for name in ("rejection", "suspicion"):
            value = getattr(self, name)
            holds = value is None or 0 < value < math.inf
            require(f"Acceptance's {name} is positive and finite, or None", value, holds)

    def init(self, m: Measurement) -> AcceptanceState:
        return AcceptanceState()

    def suspects(
        self, state: AcceptanceState, m: Measurement, penalty: float | None = None
    ) -> bool:
        """Whether `m.loss`, on the next mini-batch, calls for a validation of the last step.

        Something is then wrong with the step or with this mini-batch. `penalty` is η/2 ‖θ‖², if it is
        known: if that falls, the loss may rise.
        """
        last = state.pending
        if last is None or m.loss is None or last.predicted_change == 0:  # no step was made
            return False
        if not math.isfinite(m.loss):
            return self.rejection is not None
        if state.noise is None or self.suspicion is None:
            return False
        loss = _scale(last, m) * m.loss
        rise = loss - last.loss + (0.0 if penalty is None else penalty - last.penalty)
        usual = _unit(last, m) * state.noise
        return rise > self.suspicion * usual + _rounding(m, loss, last.loss)

    def validate(
        self,
        state: AcceptanceState,
        m: Measurement,
        *,
        loss: float,
        loss_before: float,
        penalty_change: float = 0.0,
    ) -> Verdict | None:
        """ρ of the last step, (h(θ) − h(θ − δ)) / (M(δ) − M(0)) with h on the next mini-batch.

        The losses on it are those after and before the step; `penalty_change` is η/2 (‖θ‖² − ‖θ − δ‖²).

        A step from an outlier of a mini-batch is not excused by its own loss. None if this mini-batch can't
        tell: the loss is not finite before the step either, it is 0 before and after, or it changed by less
        than its rounding error although λ is not the reason.
        """
        last = state.pending
        assert last is not None
        if not math.isfinite(loss_before) or loss == loss_before == 0:
            return None
        m = replace(
            m,
            predicted_change=last.predicted_change,
            curvature_share=last.curvature_share,
            elapsed=m.iteration - 1 - state.validated,
        )
        if not math.isfinite(loss):
            return self._rejected(state, m, math.nan, f"the loss became {loss} after it.")
        scale = _scale(last, m)
        loss, loss_before = scale * loss, scale * loss_before
        rounding = _rounding(m, loss, loss_before)
        change = loss - loss_before + penalty_change
        # What was predicted may vanish beside the loss that a bad step led to; the rise does not.
        if loss == loss_before or max(abs(last.predicted_change), abs(change)) <= rounding:
            if not m.lambda_dominates:
                return None
            return _accepted(state, replace(m, next_rho=math.nan, invisible=True), math.nan)
        rho = change / last.predicted_change
        unit = _unit(last, m)
        sample, usual = abs(loss_before - last.loss), unit * (state.noise or 0.0)
        noise = max(sample, usual)
        if state.noise is not None and m.iteration > FAMILIAR:
            sample = min(sample, OUTLIER * max(usual, rounding))
            if self.suspicion is not None:
                outlying = self.suspicion * max(usual, rounding)
                if last.loss - loss_before > outlying:
                    noise = outlying
        if self.rejection is not None and change > self.rejection * noise + rounding:
            cause = (
                f"on the next mini-batch the objective rose by {change:.3g} with it, where "
                f"{last.predicted_change:.3g} was predicted and mini-batches differ by {noise:.3g}."
            )
            reason: Reason = "model"
            if abs(loss_before - last.loss) > rounding:
                reason = "noise"
            elif change <= VISIBLE * rounding:
                reason = "rounding"
            return self._rejected(state, m, rho, cause, reason)
        negligible = NO_NOISE * abs(last.predicted_change)
        noisy = noise > rounding + scale * m.resolution + negligible
        confirmed = state.confirmed
        if noisy:
            confirmed = _average(confirmed, min(max(rho, -1.0), 1.0))
        elif confirmed is not None and noise <= negligible:
            # If the next mini-batch is the same one, what M missed is not noise, and λ corrects it.
            confirmed = _average(confirmed, 1.0)
        after = replace(state, confirmed=confirmed, noise=_average(state.noise, sample / unit))
        # Without re-scaling M may predict a rise, for which ρ ≈ 1 says nothing good.
        trusted_rho = rho if last.predicted_change < 0 else -math.inf
        return _accepted(after, replace(m, next_rho=trusted_rho, noisy=noisy), rho)

    def _rejected(
        self,
        state: AcceptanceState,
        m: Measurement,
        rho: float,
        cause: str,
        reason: Reason = "model",
    ) -> Verdict | None:
        if self.rejection is None:
            return None
        after = replace(state, pending=None, validated=m.iteration - 1)
        return Verdict(after, replace(m, next_rho=rho, rejected=True), rho, cause, reason)


def _accepted(state: AcceptanceState, m: Measurement, rho: float) -> Verdict:
    """A step that is not to be validated any more needs nothing kept for it."""
    return Verdict(replace(state, pending=None, validated=m.iteration - 1), m, rho)


def _scale(last: Pending, m: Measurement) -> float:
    """Factor of a loss on this mini-batch into the units of the step's own: a sum grows with it."""
    return last.examples / m.examples if m.summed else 1.0


def _unit(last: Pending, m: Measurement) -> float:
    """Factor of the noise, which is kept per example for a sum."""
    return float(last.examples) if m.summed else 1.0


def _rounding(m: Measurement, *losses: float) -> float:
    """What a difference of such losses may be by rounding alone."""
    return ROUNDING * m.precision * max(abs(loss) for loss in losses)


def _average(old: float | None, new: float) -> float:
    return new if old is None else DECAY * old + (1 - DECAY) * new
