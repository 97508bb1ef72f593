"""The choices that a user makes: KFAC's arguments, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from kronfac.control import (
    Acceptance,
    AnyDampingRule,
    AnyGammaRule,
    DampingRule,
    GammaRule,
    StepRule,
)
from kronfac.curvature import (
    ApproximateInverse,
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    EigenvalueCorrectedInverse,
    EmpiricalFisher,
    ExactFisher,
    Fisher,
    SampledFisher,
)

T = TypeVar("T")

FIRST_REFRESHES = 3
"""Iterations that all refresh the inverse: the statistics change fastest in the first ones [MG15 §9]."""
AGE, LONGEST_INTERVAL = 1 / 4, 20
"""An interval that is not given grows with the iteration, up to the paper's: what is as old as a quarter of
the training is out of date."""
LONGEST_LAG = LONGEST_INTERVAL // 2
"""A refresh that is adopted later than this would be half as old as the inverse that it replaces."""
STATISTICS_FRACTION, FISHER_FRACTION = 1 / 8, 1 / 4
"""τ₁ and τ₂, the paper's [MG15 §8], as shares of the mini-batch."""
LEAST_ROWS = 250
"""Terms in S₁ and S₂ at the least, if their fractions are not given: examples, or tokens if an example has
many. By the paper's fractions of a small mini-batch the factors and the curvature of the step would be
those of a few terms; with these they cost no more than the gradient. Networks with convolutions are left
out: they meet their weights at hundreds of places of an example, and passes are expensive."""
LEAST_EXAMPLES = 8
"""Examples at the least, however many terms and places each has: those of one example are alike."""


class First(float):
    """A fraction of the mini-batch that is its first examples, not random ones."""

    def __repr__(self) -> str:
        return f"First({float(self)!r})"


@dataclass(frozen=True)
class Intervals:
    """On how many examples, and how often, a step does its expensive parts.

    Args:
        statistics_fraction: τ₁, the share of the mini-batch that the statistics are taken on; None for
            1/8, or 250 examples if that is more. `First(1 / 8)` takes the first examples, as the authors'
            program does, and makes `fisher_fraction` do so too.
        fisher_fraction: τ₂, the share that the exact-Fisher products are taken on; None for 1/4, or 250
            examples if that is more.
        inverse_interval: T₃, iterations from one refresh of the inverse to the next; None for a quarter
            of the iterations so far, up to 20.
        inverse_lag: iterations from the start of a refresh to its use. If it is not 0, the inverse is
            computed in the background, beside the steps in between. Not in the first iterations.
    """

    statistics_fraction: float | None = None
    fisher_fraction: float | None = None
    inverse_interval: int | None = None
    inverse_lag: int = 0

    def __post_init__(self) -> None:
        for name in ("statistics_fraction", "fisher_fraction"):
            fraction = getattr(self, name)
            if fraction is not None and not 0 < fraction <= 1:
                raise ValueError(f"Intervals' {name} lies in (0, 1]; got {fraction}.")
        if self.inverse_interval is not None and self.inverse_interval < 1:
            raise ValueError(
                f"Intervals' inverse_interval is 1 or more; got {self.inverse_interval}."
            )
        interval = self.inverse_interval
        largest = LONGEST_LAG if interval is None else interval - 1
        if not 0 <= self.inverse_lag <= largest:
            raise ValueError(
                f"Intervals' inverse_lag lies between 0 and {largest}: a background refresh has to be "
                f"adopted before the next one starts. Got {self.inverse_lag}."
            )


ACCEPT_ALL = Acceptance(rejection=None, suspicion=None)


@dataclass(frozen=True)
class Settings:
    """The choices that a user makes, see `KFAC`."""

    inverse: ApproximateInverse
    fisher: Fisher
    damping: AnyDampingRule
    gamma: AnyGammaRule
    step_rule: StepRule
    intervals: Intervals

    def __post_init__(self) -> None:
        kinds: tuple[tuple[str, type[Any], str], ...] = (
            ("damping", DampingRule, "a rule, such as FixedDamping(0.1)"),
            ("gamma", GammaRule, "a rule, such as FixedGamma(0.1)"),
            ("step_rule", StepRule, "a rule, such as RawStep(0.1)"),
            ("intervals", Intervals, "an Intervals, such as Intervals(inverse_interval=10)"),
        )
        for name, kind, rule in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"KFAC's {name} is {rule}; got {value!r}.")
        reject = self.damping.reject
        if not isinstance(reject, Acceptance | None):
            raise ValueError(
                "The reject of a rule for λ is an Acceptance, or None to accept every step; got "
                f"{reject!r}."
            )
        self.gamma.check_interval(self.intervals.inverse_interval)

    @cached_property
    def acceptance(self) -> Acceptance:
        """When steps are validated out of turn, and when they are rejected."""
        return ACCEPT_ALL if self.damping.reject is None else self.damping.reject


# ------------------------------------------------------------------------------------------ arguments

REMEDIES = {
    "momentum": "K-FAC finds μ itself in every step; step_rule=QuadraticModel(momentum=False) has none.",
    "nesterov": "K-FAC finds α and μ itself in every step.",
    "betas": "K-FAC's moving averages have one decay: fisher=SampledFisher(ema_decay=…).",
    "eps": "K-FAC's damping is λ and γ: damping=FixedDamping(…), gamma=FixedGamma(…).",
    "amsgrad": "That is Adam's.",
    "foreach": "K-FAC works on matrices of its own.",
    "fused": "K-FAC works on matrices of its own.",
    "maximize": "Minimise the negative loss.",
    "average_decay": "Keep an average with torch.optim.swa_utils.AveragedModel.",
    "verbose": "Print the plan with print(kronfac.plan(model, loss, example)).",
    "other": "Use blocks=Blocks(unsupported='refuse').",
    "inverse_share": "All ranks hold all inverses.",
    "acceptance": "It belongs to the rule for λ: damping=AdaptiveDamping(reject=None) accepts every step.",
    "clip": "It belongs to the step rule: step_rule=QuadraticModel(radius=…).",
    "statistics_fraction": "Use intervals=Intervals(statistics_fraction=…).",
    "fisher_fraction": "Use intervals=Intervals(fisher_fraction=…).",
    "inverse_interval": "Use intervals=Intervals(inverse_interval=…).",
    "inverse_lag": "Use intervals=Intervals(inverse_lag=…).",
}
"""What to do instead of an argument that other optimizers have, or that KFAC had."""


IN_FRONT = {
    "sides": "kronfac.WhitenedMomentum preconditions by the inputs alone.",
    "momentum": "The optimizer that comes after has its own.",
    "weight_decay": "The optimizer that comes after has its own.",
}
"""The same for `Preconditioner`."""


def refuse_unknown(who: str, unknown: Mapping[str, Any]) -> None:
    """Raise a TypeError for arguments that `KFAC` or `Preconditioner` does not have."""
    for name, value in unknown.items():
        remedies = REMEDIES if who == "KFAC" else IN_FRONT
        remedy = remedies.get(name, f"Its arguments are in help(kronfac.{who}).")
        raise TypeError(f"{who} has no argument {name!r}; got {name}={value!r}. {remedy}")


# ---------------------------------------------------------------------------------------------- names


def inverse_of(choice: str | ApproximateInverse | type[ApproximateInverse]) -> ApproximateInverse:
    """An inverse from its name, its class or an instance."""
    names: dict[str, type[ApproximateInverse]] = {
        "block_diagonal": BlockDiagonalInverse,
        "block_tridiagonal": BlockTridiagonalInverse,
        "ekfac": EigenvalueCorrectedInverse,
    }
    return _chosen("inverse", choice, names, ApproximateInverse)  # type: ignore[type-abstract]


def fisher_of(choice: str | Fisher | type[Fisher]) -> Fisher:
    """A Fisher from its name, its class or an instance."""
    names: dict[str, type[Fisher]] = {
        "sampled": SampledFisher,
        "empirical": EmpiricalFisher,
        "exact": ExactFisher,
    }
    return _chosen("fisher", choice, names, Fisher)  # type: ignore[type-abstract]


def _chosen(what: str, choice: Any, names: dict[str, type[T]], kind: type[T]) -> T:
    if isinstance(choice, str) and choice in names:
        choice = names[choice]
    if isinstance(choice, type) and issubclass(choice, kind):
        choice = choice()
    if not isinstance(choice, kind):
        raise ValueError(
            f"KFAC's {what} is one of {sorted(names)}, or an instance of {kind.__name__}; got {choice!r}."
        )
    return choice
