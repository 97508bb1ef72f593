"""The interface of a rule for λ [MG15 §6.5]."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from kronfac.control.base import Rule
from kronfac.control.lambda_search import LambdaSearch
from kronfac.ranges import Range
from kronfac.storage import Storable


@dataclass(frozen=True)
class DampingState(Storable):
    """λ. A rule that remembers more adds fields."""

    lambda_: Annotated[float, Range(0, nan=True)]
    """NaN for one that the first step finds."""


D = TypeVar("D", bound=DampingState)


class DampingRule(Rule[D]):
    """How λ starts and moves [MG15 §6.5].

    `update` is called with every measurement of ρ: `m.rho`, `m.next_rho` or a rejection.
    """

    search: LambdaSearch | None = None
    """How the first step looks for a better λ; None leaves the first one as it is."""

    def measures(self, iteration: int) -> Literal["own", "next"] | None:
        """Whether ρ is wanted at this iteration, which costs a forward pass.

        `"own"`: of the step that is being made, on its own mini-batch. `"next"`: of the last step, on the
        mini-batch of this one.
        """
        return None


AnyDampingRule = DampingRule[Any]


def check_lambda(lambda_: float) -> None:
    """Refuse a first λ that is negative or not finite."""
    if not 0 <= lambda_ < math.inf:
        raise ValueError(f"λ is finite and not negative; got {lambda_}.")
