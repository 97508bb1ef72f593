"""Was the last step a good one? Judged by the rows of the next mini-batch, which it has not seen.

Nothing here changes anything: the optimizer restores what a judgement says to take back.
"""

import math
from dataclasses import dataclass, replace

import torch

from kronfac.proposal import ROUNDING, Evaluation, Network, decay_change, moved_loss
from kronfac.report import Event
from kronfac.state import State
from kronfac.step_size import DOMINATED, DampingRule, Verdict

DECAY = 0.8
"""Of the moving averages of ρ and of the noise, per judgement."""
NO_NOISE = 1e-2
"""Share of the predicted change below which noise explains nothing of ρ."""
SIGNIFICANT = 2.0
"""Times the noise that a rise has to be for the step to be taken back."""


@dataclass(frozen=True)
class Judgement:
    """What the next mini-batch says of the last step."""

    state: State
    """With λ moved, and nothing left to judge."""
    rho: float
    """NaN where the loss is not finite after the step, or the step too short to be seen."""
    event: Event | None = None
    """Why the step has to be taken back."""


def judge(
    network: Network, rule: DampingRule, evaluation: Evaluation, state: State, in_turn: bool
) -> Judgement | None:
    """ρ of the last step, (h(θ) − h(θ − δ)) / (M(δ) − M(0)) with h on the new rows.

    θ − δ was seen on the step's own rows and is now seen on these: the difference of the two losses is
    the noise of sampling. A step after which h is higher by more than twice that is taken back.

    None if these rows can't tell: the loss is not finite before the step either, or what changed is
    below the rounding error of the loss. Out of turn, a loss that is finite is not looked into.
    """
    last, delta, loss = state.last, state.previous_delta, float(evaluation.loss)
    if last is None or delta is None or (math.isfinite(loss) and not in_turn):
        return None
    back = tuple(V.neg() for V in delta)
    seen = evaluation.batch.seen_loss
    loss_seen = seen is not None and evaluation.seen(loss, float(seen), delta[0].dtype)
    loss_before = float(moved_loss(network, evaluation, loss_seen, back))
    if not math.isfinite(loss_before):
        return None
    if not math.isfinite(loss):
        return _against(rule, state, math.nan, f"the loss became {loss} after it.")
    # A sum over cases is of the size of its mini-batch; all of this is in units of the step's own.
    scale = last.cases / evaluation.batch.cases if network.objective.reduction == "sum" else 1.0
    loss, loss_before = scale * loss, scale * loss_before
    rounding = ROUNDING * torch.finfo(delta[0].dtype).eps * max(abs(loss), abs(last.loss))
    if abs(last.predicted_change) <= rounding or loss == loss_before:
        return _invisible(state)
    change = loss - loss_before - decay_change(network, evaluation.weight_decay, back)
    rho = change / last.predicted_change
    sample = abs(loss_before - last.loss)
    noise = max(sample, state.noise or 0.0)
    if change > SIGNIFICANT * noise + rounding:
        cause = (
            f"on the next mini-batch the objective rose by {change:.3g} with it, where "
            f"{last.predicted_change:.3g} was predicted and mini-batches differ by {noise:.3g}."
        )
        return _against(rule, state, rho, cause)
    verdict = Verdict(
        # Without re-scaling M may predict a rise, of which ρ ≈ 1 says nothing good.
        rho=rho if last.predicted_change < 0 else -math.inf,
        share=last.curvature_share,
        noisy=noise > rounding + NO_NOISE * abs(last.predicted_change),
        elapsed=state.iteration - state.judged_iteration,
    )
    judged = replace(
        state,
        lambda_=rule.judged(state.lambda_, verdict),
        judged_iteration=state.iteration,
        confirmed=_average(state.confirmed, min(max(rho, -1.0), 1.0)),
        noise=_average(state.noise, sample),
        last=None,
    )
    return Judgement(judged, rho)


def _invisible(state: State) -> Judgement | None:
    """Of a step that is too short to be seen: where it is λ that made it so, λ is less."""
    assert state.last is not None
    if state.last.curvature_share >= DOMINATED:
        return None
    shorter = replace(
        state, lambda_=state.lambda_ / 10, judged_iteration=state.iteration, last=None
    )
    return Judgement(shorter, math.nan)


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
        previous_delta=None if kept is None else kept.previous_delta,
        last=None,
    )
    return Judgement(before, rho, Event("taken_back", f"The last step is taken back: {cause}"))
