"""Was the last step a good one? Judged by the rows of the next mini-batch, which it has not seen.

Nothing here changes anything: the optimizer restores what a judgement says to take back.
"""

import math
from dataclasses import dataclass, replace

import torch

from kronfac.point import ROUNDING, Evaluation, Network, decay_change, moved_loss
from kronfac.report import Event
from kronfac.state import LastStep, State
from kronfac.step_size import DOMINATED, DampingRule, Verdict

DECAY = 0.8
"""Of the moving averages of ρ and of the noise, per judgement."""
NO_NOISE = 1e-2
"""Share of the predicted change below which noise explains nothing of ρ."""
SIGNIFICANT = 2.0
"""Times the noise that a rise has to be for the step to be taken back."""
SUSPICIOUS = 4.0
"""Times the noise that the loss has to be above that of the mini-batch before for the step between them to
be judged out of turn; two mini-batches at the same θ differ by more about once in a thousand times."""
FAMILIAR = 10
"""Iterations after which it is known by how much mini-batches differ, and that one is odd."""
OUTLIER = 8.0
"""Times the noise that one sample of it counts as at most."""


@dataclass(frozen=True)
class Judgement:
    """What the next mini-batch says of the last step."""

    state: State
    """With λ moved, and nothing left to judge."""
    rho: float
    """NaN where the loss is not finite after the step, or the step too short to be seen."""
    event: Event | None = None
    """Why the step has to be taken back."""


def judges_next(rule: DampingRule, state: State) -> bool:
    """Whether the step after this state judges the one before."""
    last = state.last
    if last is None:
        return False
    return rule.judges(state.iteration + 1) or (rule.suspects and last.kept is not None)


def suspicious(
    network: Network,
    rule: DampingRule,
    state: State,
    cases: int,
    loss: float,
    penalty: float | None = None,
) -> bool:
    """Whether the loss of the next mini-batch calls for a judgement of a step that was to have none.

    Something is then wrong with the step or with these rows. `penalty` is η/2 ‖θ‖², if it is known: where
    that falls, the loss may rise.
    """
    last = state.last
    if last is None or last.predicted_change == 0:  # no step was made
        return False
    if not math.isfinite(loss):
        return True
    if state.noise is None or not rule.suspects:
        return False
    loss *= _scale(network, last, cases)
    assert state.previous_delta is not None
    rounding = _rounding(state.previous_delta[0].dtype, loss, last.loss)
    rise = loss - last.loss + (0.0 if penalty is None else penalty - last.penalty)
    return rise > SUSPICIOUS * _unit(network, last) * state.noise + rounding


def judge(
    network: Network, rule: DampingRule, evaluation: Evaluation, state: State
) -> Judgement | None:
    """ρ of the last step, (h(θ) − h(θ − δ)) / (M(δ) − M(0)) with h on the new rows.

    θ − δ was seen on the step's own rows and is now seen on these: the difference of the two losses is
    the noise of sampling. A step after which h is higher by more than twice that is taken back. Where it
    is the step's own rows that were odd, that is no excuse for the step.

    None if these rows can't tell: the loss is not finite before the step either, it is 0 before and after,
    or what changed is below its rounding error; and if there was no step to speak of.
    """
    last, delta, loss = state.last, state.previous_delta, float(evaluation.loss)
    if last is None or delta is None or last.predicted_change == 0:
        return None
    back = tuple(V.neg() for V in delta)
    loss_seen = evaluation.loss_seen(delta[0].dtype)
    loss_before = float(moved_loss(network, evaluation, loss_seen, back))
    if not math.isfinite(loss_before) or loss == loss_before == 0:
        return None
    if not math.isfinite(loss):
        return _against(rule, state, math.nan, f"the loss became {loss} after it.")
    scale = _scale(network, last, evaluation.batch.cases)
    loss, loss_before = scale * loss, scale * loss_before
    rounding = _rounding(delta[0].dtype, loss, loss_before)
    change = loss - loss_before - decay_change(network, evaluation.weight_decay, back)
    # What was predicted may vanish beside the loss that a bad step led to; the rise does not.
    if loss == loss_before or max(abs(last.predicted_change), abs(change)) <= rounding:
        return _invisible(state)
    rho = change / last.predicted_change
    unit = _unit(network, last)
    sample, usual = abs(loss_before - last.loss), unit * (state.noise or 0.0)
    noise = max(sample, usual)
    if state.noise is not None and state.iteration >= FAMILIAR:
        sample = min(sample, OUTLIER * max(usual, rounding))
        far = SUSPICIOUS * max(usual, rounding)
        if last.loss - loss_before > far:
            noise = far
    if change > SIGNIFICANT * noise + rounding:
        cause = (
            f"on the next mini-batch the objective rose by {change:.3g} with it, where "
            f"{last.predicted_change:.3g} was predicted and mini-batches differ by {noise:.3g}."
        )
        return _against(rule, state, rho, cause)
    resolution = scale * network.resolution(evaluation.batch)
    negligible = NO_NOISE * abs(last.predicted_change)
    noisy = noise > rounding + resolution + negligible
    confirmed = state.confirmed
    if noisy:
        confirmed = _average(confirmed, min(max(rho, -1.0), 1.0))
    elif confirmed is not None and noise <= negligible:
        # Where the next rows are the same ones, what M missed is no noise, and λ sees to it.
        confirmed = _average(confirmed, 1.0)
    verdict = Verdict(
        # Without re-scaling M may predict a rise, of which ρ ≈ 1 says nothing good.
        rho=rho if last.predicted_change < 0 else -math.inf,
        share=last.curvature_share,
        noisy=noisy,
        elapsed=state.iteration - state.judged_iteration,
    )
    judged = replace(
        _done(state),
        lambda_=rule.judged(state.lambda_, verdict),
        judged_iteration=state.iteration,
        confirmed=confirmed,
        noise=_average(state.noise, sample / unit),
    )
    return Judgement(judged, rho)


def _scale(network: Network, last: LastStep, cases: int) -> float:
    """Of a loss on so many cases, into the units of the step's own mini-batch: a sum grows with it."""
    return last.cases / cases if network.objective.reduction == "sum" else 1.0


def _unit(network: Network, last: LastStep) -> float:
    """Of the noise, which is kept per case for a sum."""
    return float(last.cases) if network.objective.reduction == "sum" else 1.0


def _rounding(dtype: torch.dtype, *losses: float) -> float:
    """What a difference of such losses may be by rounding alone."""
    return ROUNDING * torch.finfo(dtype).eps * max(abs(loss) for loss in losses)


def _invisible(state: State) -> Judgement | None:
    """Of a step that is too short to be seen: where it is λ that made it so, λ is less."""
    assert state.last is not None
    if state.last.curvature_share >= DOMINATED:
        return None
    shorter = replace(
        _done(state),
        lambda_=state.lambda_ / 10,
        judged_iteration=state.iteration,
    )
    return Judgement(shorter, math.nan)


def _done(state: State) -> State:
    """Of a step that will not be judged any more nothing is kept but what momentum goes on with."""
    return replace(state, previous_delta=state.momentum, remembered=None, last=None)


def _average(old: float | None, new: float) -> float:
    return new if old is None else DECAY * old + (1 - DECAY) * new


def _against(rule: DampingRule, state: State, rho: float, cause: str) -> Judgement:
    """The state before the step, but for what it taught: statistics and inverse, a larger λ."""
    assert state.last is not None
    kept = state.last.kept
    elapsed = state.iteration - state.judged_iteration
    verdict = Verdict(
        rho, state.last.curvature_share, noisy=False, elapsed=elapsed, taken_back=True
    )
    before = replace(
        state,
        lambda_=rule.judged(state.lambda_, verdict),
        judged_iteration=state.iteration,
        previous_delta=None if kept is None else kept.momentum,
        remembered=None,
        last=None,
    )
    return Judgement(before, rho, Event("taken_back", f"The last step is taken back: {cause}"))
