"""One interface to K-FAC, the baseline and everything in `torch.optim`: step, and say what was done."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kronfac import Intervals, presets
from kronfac.control import AdaptiveDamping, ConjugateGradients, LongMemory, Measurement
from kronfac.curvature import SampledFisher
from kronfac.errors import KronfacError
from kronfac.extend import First
from kronfac.kfac import KFAC
from kronfac.objective import Likelihood
from kronfac.report import Stopwatch
from kronfac_experiments.baseline import NesterovMomentum, momentum_at
from kronfac_experiments.config import TORCH_OPTIMIZERS, KfacOptions, TrainConfig

CHUNK = 5000
"""Rows of a mini-batch at a time, as in the authors' program: memory does not grow with the batch."""


class TrainingFailedError(KronfacError):
    """Training cannot go on."""

    exit_code = 1


class DivergedError(TrainingFailedError):
    """The optimizer left the numbers behind: it would do so again."""


@dataclass(frozen=True)
class StepNumbers:
    """What a step did.

    Args:
        numbers: loss, lambda, gamma, rho, next_rho, alpha and mu, those that the optimizer has. The loss is
            a mean over the mini-batch before the step, without the weight-decay term; alpha is a learning
            rate but for K-FAC; next_rho is ρ of the step before, on this step's mini-batch.
        parts: Seconds by part.
        trials: Evaluations of the mini-batch beyond those of an ordinary step.
        events: In words.
        refused: Whether no step was taken.
    """

    numbers: dict[str, float | None]
    parts: dict[str, float] = field(default_factory=dict)
    trials: int = 0
    events: tuple[str, ...] = ()
    refused: bool = False


class Stepper(Protocol):
    """An optimizer on a model and a loss."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What a checkpoint has to keep."""
        ...

    def start(self) -> StepNumbers:
        """What is known before the first step."""
        ...

    def step(self, x: Tensor, y: Tensor) -> StepNumbers:
        """One step on a mini-batch."""
        ...


def make_stepper(config: TrainConfig, model: nn.Module, loss: Likelihood) -> Stepper:
    """The optimizer that a resolved configuration describes."""
    if config.optimizer == "kfac":
        return KfacStepper(_kfac(config, model, loss))
    return FirstOrderStepper(config, model, loss)


def _kfac(config: TrainConfig, model: nn.Module, loss: Likelihood) -> KFAC:
    """With the constants of a preset and what the configuration changes of them."""
    options = config.kfac
    settings: dict[str, Any] = presets.paper() if options.preset == "paper" else {}
    damping = settings.get("damping", AdaptiveDamping())
    settings |= {
        "damping": replace(damping, lambda_=options.lambda0),
        "step_rule": ConjugateGradients(
            momentum=options.momentum,
            bounded=options.preset == "default",
            memory=LongMemory() if options.preset == "default" else None,
            cg_steps=options.cg_steps,
        ),
        "intervals": replace(
            settings.get("intervals", Intervals()),
            statistics_fraction=_fraction(options, options.statistics_fraction),
            fisher_fraction=_fraction(options, options.fisher_fraction),
        ),
    }
    return KFAC(
        model,
        loss,
        inverse=options.inverse,
        weight_decay=config.weight_decay or 0.0,
        fisher=SampledFisher(seed=config.seed),
        **settings,
    )


def _fraction(options: KfacOptions, fraction: float | None) -> float | None:
    """The fraction, of the first examples with the paper's constants."""
    return First(fraction) if options.preset == "paper" and fraction is not None else fraction


class KfacStepper:
    """K-FAC, in chunks if the mini-batch is large."""

    def __init__(self, optimizer: KFAC) -> None:
        self.optimizer = optimizer

    def start(self) -> StepNumbers:
        """λ₀ and γ₀, if they are known before the first mini-batch."""
        settings = self.optimizer.settings
        weight_decay = float(self.optimizer.param_groups[0]["weight_decay"])
        lambda_ = settings.damping.init(Measurement(weight_decay=weight_decay)).lambda_
        if math.isnan(lambda_):
            return StepNumbers({})
        m = Measurement(lambda_=lambda_, weight_decay=weight_decay)
        return StepNumbers({"lambda": lambda_, "gamma": settings.gamma.init(m).gamma})

    def step(self, x: Tensor, y: Tensor) -> StepNumbers:
        """One step."""
        self.optimizer.step(self.optimizer.closure(x, y, chunk=CHUNK))
        report = self.optimizer.report
        assert report is not None
        names = ("loss", "gamma", "rho", "next_rho", "alpha", "mu")
        return StepNumbers(
            {"lambda": report.lambda_} | {name: getattr(report, name) for name in names},
            dict(report.seconds),
            # After a rejected step the mini-batch is evaluated again.
            trials=report.trials + report.rejected,
            events=tuple(f"{event.kind}: {event.message}" for event in report.events),
            refused=report.refused,
        )


class FirstOrderStepper:
    """Nesterov momentum, or a class of `torch.optim` with its own defaults.

    An optimizer with an argument `weight_decay` gets η there; to others the closure gives the loss
    and the gradient of the objective with the term η/2 ‖θ‖².
    """

    def __init__(self, config: TrainConfig, model: nn.Module, loss: Likelihood) -> None:
        self._name, self._model, self._loss = config.optimizer, model, loss
        kind: Callable[..., torch.optim.Optimizer] = NesterovMomentum
        if config.optimizer != "nag":
            kind = TORCH_OPTIMIZERS[config.optimizer]
        eta, options = config.weight_decay or 0.0, config.first_order
        if options.lr is not None and not 0 < options.lr < math.inf:
            raise ValueError(f"--lr is positive and finite; got {options.lr}.")
        has_decay = "weight_decay" in inspect.signature(kind).parameters
        given = {
            "lr": options.lr,
            "mu_max": options.mu_max,
            "weight_decay": eta if has_decay else None,
        }
        arguments = {name: value for name, value in given.items() if value is not None}
        self.optimizer = kind(list(model.parameters()), **arguments)
        self._closure_decay = 0.0 if has_decay else eta

    def start(self) -> StepNumbers:
        """Nothing but the learning rate and the first μ."""
        return StepNumbers({"alpha": self._rate(), "mu": self._momentum()})

    def step(self, x: Tensor, y: Tensor) -> StepNumbers:
        """One step; a loss that is not finite stops before the parameters are touched."""
        watch = Stopwatch()
        losses: list[float] = []
        before = self.start().numbers

        def closure() -> Tensor:
            with watch("gradient"):
                value = self._gradient(x, y)
                # Reading the number also waits for a device that works behind.
                losses.append(float(value))
                if not math.isfinite(losses[-1]):
                    raise DivergedError(
                        f"The loss became {losses[-1]} with {self._name}, learning rate {before['alpha']}: "
                        "the run diverged; a smaller --lr may help."
                    )
                return self._with_decay(value)

        with watch("update"):
            self.optimizer.step(closure)  # type: ignore[arg-type]
        watch.seconds["update"] -= watch.seconds["gradient"]
        return StepNumbers({"loss": losses[0], **before}, dict(watch.seconds))

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss over the rows; its gradient is left in the parameters."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=x.device, dtype=x.dtype)
        for inputs, targets in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
            loss = self._loss(self._model(inputs), targets) * (len(inputs) / len(x))
            loss.backward()
            total += loss.detach()
        return total

    def _with_decay(self, loss: Tensor) -> Tensor:
        if not self._closure_decay:
            return loss
        with torch.no_grad():
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(parameter, alpha=self._closure_decay)
                loss = loss + self._closure_decay / 2 * parameter.square().sum()
        return loss

    def _rate(self) -> float | None:
        rate = self.optimizer.param_groups[0].get("lr")
        return None if rate is None else float(rate)

    def _momentum(self) -> float | None:
        group = self.optimizer.param_groups[0]
        if isinstance(self.optimizer, NesterovMomentum):
            return momentum_at(group["updates"], group["mu_max"])
        momentum = group.get("momentum")
        return float(momentum) if isinstance(momentum, int | float) else None
