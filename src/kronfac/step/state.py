"""Everything that K-FAC carries from one step to the next (`saving.py` saves and loads it)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kronfac.control import (
    AcceptanceState,
    DampingState,
    GammaState,
    Measurement,
    StepState,
)
from kronfac.curvature import Curvature, DampedInverse
from kronfac.settings import Settings
from kronfac.step.evaluation import Evaluation
from kronfac.step.inverses import Inverter
from kronfac.storage import UNSAVED, Storable


@dataclass(frozen=True)
class CurrentInverse(Storable):
    """The inverse that is in use."""

    inverse: DampedInverse
    iteration: int
    """Iteration of the factors that it was computed from."""
    lambda_: float
    """λ then."""


@dataclass(frozen=True)
class Refresh(Storable):
    """One refresh of the inverse: to be computed, under way or done."""

    iteration: int
    """Iteration of the factors that it is computed from."""
    adoption: int
    """The iteration that makes the first step with it."""
    lambda_: float
    """λ when it started."""
    candidates: tuple[float, ...]
    """The γ's to be tried."""
    curvature: Curvature
    """The factors."""
    inverter: Inverter | None = field(default=None, metadata=UNSAVED)
    """What computes it; None of a saved one."""

    def begin(self) -> None:
        """Compute it in the background."""
        assert self.inverter is not None
        self.inverter.begin(self.candidates)


CHECK_INTERVAL = 100
"""Iterations from one check of the gradient to the next."""


@dataclass(frozen=True)
class CheckState(Storable):
    """What comparisons of the gradient with the recorded losses have found (`kronfac.check`)."""

    compared: bool = False
    """Whether there was one."""
    scale: float = 1.0
    """The factor of the gradients of all steps."""
    scales: tuple[float | None, float | None] = (None, None)
    """The factors in the last two comparisons."""

    def due(self, iteration: int, measured: bool) -> bool:
        """Whether to compare in this step; `measured` if its reduction ratio will be measured."""
        earlier, last = self.scales
        clips = earlier is not None and earlier != last
        # A factor was found once: the next comparison tells clipping from a factor of the loss.
        undecided = earlier is None and last not in (None, 1.0)
        first = iteration == 1 or not self.compared
        return first or not iteration % CHECK_INTERVAL or undecided or (clips and measured)


@dataclass(frozen=True)
class State(Storable):
    """The optimizer between two steps: a value, replaced as a whole when a step is committed."""

    iteration: int
    """Steps taken."""
    generator: Tensor
    """State of the generator that targets are drawn with, bytes."""
    damping: DampingState
    gamma: GammaState | None
    """None until λ is known."""
    step: StepState
    acceptance: AcceptanceState
    curvature: Curvature | None = None
    current: CurrentInverse | None = None
    refresh: Refresh | None = None
    """Under way in the background."""
    gradients: CheckState = CheckState()
    """What checks of the gradient have found."""

    def measure(self, evaluation: Evaluation) -> Measurement:
        """What the rules know before the next step is computed."""
        batch, current = evaluation.batch, self.current
        refreshed = 0 if current is None else current.iteration
        return Measurement(
            iteration=self.iteration + 1,
            examples=evaluation.examples,
            weight_decay=evaluation.weight_decay.least,
            lambda_=self.damping.lambda_,
            gamma=math.nan if self.gamma is None else self.gamma.gamma,
            summed=batch.summed,
            precision=torch.finfo(evaluation.network.dtype).eps,
            resolution=evaluation.numbers.resolution,
            confirmed=self.acceptance.confirmed,
            noise=self.acceptance.noise,
            inverse_age=self.iteration + 1 - refreshed,
            inverse_lambda=None if current is None else current.lambda_,
        )


def initial_state(settings: Settings, weight_decay: float, device: torch.device) -> State:
    """The state before the first step."""
    m = Measurement(weight_decay=weight_decay)
    damping = settings.damping.init(m)
    # A model without storage can be planned for, and nothing is drawn there.
    generator = torch.Generator(device="cpu" if device.type == "meta" else device)
    return State(
        iteration=0,
        generator=generator.manual_seed(settings.fisher.seed).get_state(),
        damping=damping,
        gamma=initial_gamma(settings, damping, weight_decay),
        step=settings.step_rule.init(m),
        acceptance=settings.acceptance.init(m),
    )


def initial_gamma(
    settings: Settings, damping: DampingState, weight_decay: float
) -> GammaState | None:
    """What the rule for γ remembers at first; None if λ is not known."""
    if math.isnan(damping.lambda_):  # NaN
        return None
    m = Measurement(lambda_=damping.lambda_, weight_decay=weight_decay)
    gamma: GammaState = settings.gamma.init(m)
    return gamma
