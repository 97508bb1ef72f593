"""What the next step would improve, against its γ, with and without re-scaling and momentum [MG15 §6.4].

The steps are computed by `kronfac.step.take.compute_step` from the optimizer's own state, and not taken.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kronfac.control import (
    FixedGamma,
    GammaState,
    LevenbergMarquardtRule,
    QuadraticModel,
    RawStep,
    StepRule,
)
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.groups import PerParameter
from kronfac.kfac import KFAC
from kronfac.model.side_effects import full_precision
from kronfac.report import Stopwatch
from kronfac.settings import Settings
from kronfac.step.collect import evaluate_closure
from kronfac.step.evaluation import Evaluation, RefusedError
from kronfac.step.state import State
from kronfac.step.take import compute_step

RULES: dict[str, StepRule] = {
    "re-scaling and momentum": QuadraticModel(bounded=False, memory=None),
    "re-scaling": QuadraticModel(momentum=False, bounded=False, memory=None),
    "neither": RawStep(),
}
"""The three curves of the paper's figure 7: δ = αΔ + μδ₀, δ = αΔ and δ = Δ."""


@dataclass(frozen=True)
class Improvement:
    """One step that was tried."""

    rule: str
    """A key of `RULES`."""
    gamma: float
    improvement: float
    """h(θ) − h(θ + δ) on the mini-batch, weight decay included; −inf or NaN if h overflows, NaN
    also if the damped factors can't be inverted."""
    predicted: float
    """M(0) − M(δ)."""
    alpha: float
    mu: float
    """0 without momentum."""


@torch.no_grad()
def damping_sweep(
    optimizer: KFAC, closure: Callable[[], Any], gammas: Sequence[float]
) -> list[Improvement]:
    """The improvement of the next step for every γ, by each of `RULES`.

    The statistics take in this mini-batch, as they would in `step`, and the inverse is refreshed for
    each γ; λ, δ₀ and the sampled targets are the optimizer's. Nothing is changed but the gradients
    that the closure leaves in the parameters.

    Args:
        optimizer: after any number of steps; without a previous update, momentum makes no difference.
        closure: for the mini-batch, such as `optimizer.closure(x, y)`.
        gammas: damping strengths, positive.
    """
    if math.isnan(optimizer._state.damping.lambda_):
        raise ValueError(
            "damping_sweep needs λ, which AdaptiveDamping finds in the first step; take that first."
        )
    with full_precision(optimizer.network.device) as callers:
        evaluation = evaluate_closure(
            closure,
            optimizer.model,
            optimizer.network,
            weight_decay=PerParameter.of_groups(optimizer.param_groups, "weight_decay"),
            inverse=optimizer.settings.inverse,
            callers=callers,
        )
        found = []
        for name, rule in RULES.items():
            settings = replace(
                optimizer.settings,
                gamma=FixedGamma(),
                step_rule=rule,
                # Measures ρ, and so h(θ + δ), in every step.
                damping=LevenbergMarquardtRule(interval=1),
                intervals=replace(optimizer.settings.intervals, inverse_interval=1, inverse_lag=0),
            )
            for gamma in gammas:
                before = replace(
                    optimizer._state, gamma=GammaState(gamma), current=None, refresh=None
                )
                found.append(_improvement(name, gamma, settings, evaluation, before))
    return found


def _improvement(
    name: str, gamma: float, settings: Settings, evaluation: Evaluation, before: State
) -> Improvement:
    try:
        report = compute_step(settings, evaluation, before, Stopwatch()).report
    except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
        nan = math.nan
        return Improvement(name, gamma, nan, nan, nan, nan)
    assert report.predicted_change is not None
    assert report.alpha is not None
    # ρ is the ratio of the two changes; at a stationary point there is neither.
    change = 0.0 if report.rho is None else report.rho * report.predicted_change
    return Improvement(
        rule=name,
        gamma=gamma,
        improvement=-change,
        predicted=-report.predicted_change,
        alpha=report.alpha,
        mu=report.mu or 0.0,
    )
