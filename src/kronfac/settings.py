"""The choices that a user makes, and what follows from them: when to refresh, on how many rows."""

from dataclasses import dataclass
from typing import Any, TypeVar

from kronfac.inverses import ApproximateInverse, BlockDiagonalInverse, BlockTridiagonalInverse
from kronfac.statistics import EmpiricalFisher, ExactFisher, Fisher, SampledFisher
from kronfac.step_size import DampingRule, GammaRule, StepRule

T = TypeVar("T")

# The statistics change fastest in the first iterations, so the inverse is fresh in each [MG15 §9].
FIRST_REFRESHES = 3
# Where the interval is left open it grows with the iteration, up to the paper's: what is as old as a
# quarter of the training is out of date.
AGE, LONGEST_INTERVAL = 1 / 4, 20
# A refresh that is in use later than this would be half as old as the inverse that it replaces.
LONGEST_LAG = LONGEST_INTERVAL // 2
# With the paper's fractions of a small mini-batch the factors and the curvature of the step would be of a
# few rows; with these they cost no more than the gradient.
LEAST_ROWS = 250


@dataclass(frozen=True)
class Settings:
    """The choices that a user makes, see `KFAC`."""

    inverse: ApproximateInverse
    fisher: Fisher
    damping: DampingRule
    gamma: GammaRule
    step_size: StepRule
    statistics_fraction: float | None
    fisher_fraction: float | None
    inverse_interval: int | None
    inverse_lag: int = 0

    def __post_init__(self) -> None:
        for name, method, remedy in (
            ("damping", "judges", "FixedDamping(0.1)"),
            ("gamma", "candidates", "FixedGamma(0.1)"),
            ("step_size", "solve", "RawStep(0.1)"),
        ):
            rule = getattr(self, name)
            if isinstance(rule, type) or not hasattr(rule, method):
                raise ValueError(f"KFAC's {name} is a rule, such as {remedy}; got {rule!r}.")
        for name in ("statistics_fraction", "fisher_fraction"):
            fraction = getattr(self, name)
            if fraction is not None and not 0 < fraction <= 1:
                raise ValueError(f"{name} lies in (0, 1]; got {fraction}.")
        if self.inverse_interval is not None and self.inverse_interval < 1:
            raise ValueError(f"inverse_interval is 1 or more; got {self.inverse_interval}.")
        interval = self.inverse_interval
        largest = LONGEST_LAG if interval is None else interval - 1
        if not 0 <= self.inverse_lag <= largest:
            raise ValueError(
                f"inverse_lag lies between 0 and {largest}, so that a refresh is in use before the next "
                f"one starts; got {self.inverse_lag}."
            )
        self.gamma.check_interval(self.inverse_interval)

    def refreshes(self, iteration: int, last: int) -> bool:
        """Whether the inverse is refreshed at this iteration, the last refresh being at another."""
        if iteration <= FIRST_REFRESHES:
            return True
        if self.inverse_interval is not None:
            return iteration % self.inverse_interval == 0
        return iteration - last >= min(AGE * iteration, LONGEST_INTERVAL)

    def lag(self, iteration: int) -> int:
        """Iterations from the start of a refresh at this iteration to its use."""
        if iteration <= FIRST_REFRESHES:
            return 0
        if self.inverse_interval is None and 2 * self.inverse_lag > AGE * iteration:
            return 0  # it would be out of date by then
        return self.inverse_lag

    def statistics_share(self, cases: int) -> float:
        """τ₁ for a mini-batch of so many cases."""
        return _share(self.statistics_fraction, 1 / 8, cases)

    def fisher_share(self, cases: int) -> float:
        """τ₂ for a mini-batch of so many cases."""
        return _share(self.fisher_fraction, 1 / 4, cases)


def _share(chosen: float | None, usual: float, cases: int) -> float:
    return max(usual, min(1.0, LEAST_ROWS / cases)) if chosen is None else chosen


# ---------------------------------------------------------------------------------------------- names


def inverse_of(choice: str | ApproximateInverse | type[ApproximateInverse]) -> ApproximateInverse:
    """An inverse from its name, its class or an instance."""
    names: dict[str, type[ApproximateInverse]] = {
        "block_diagonal": BlockDiagonalInverse,
        "block_tridiagonal": BlockTridiagonalInverse,
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
