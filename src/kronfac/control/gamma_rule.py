"""The interface of a rule for γ [MG15 §6.6]."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from kronfac.control.base import Measurement, Rule
from kronfac.ranges import Positive
from kronfac.storage import Storable


@dataclass(frozen=True)
class GammaState(Storable):
    """γ. A rule that remembers more adds fields."""

    gamma: Positive


G = TypeVar("G", bound=GammaState)


class GammaRule(Rule[G]):
    """How γ, the damping strength of the approximate Fisher, starts and moves [MG15 §6.6].

    `init` is called when λ is known. `update` is called after every step, with the γ that it was made with
    in `m.gamma` and those that were tried in `m.candidates`, if the inverse was refreshed.
    """

    criterion: Literal["model", "objective"] = "model"
    """What the best of several candidates has lowest: M(δ), or h(θ + δ), by a forward pass for each."""

    @abstractmethod
    def candidates(self, state: G, m: Measurement) -> tuple[float, ...]:
        """The γ's to try if the inverse is refreshed, each different, the preferred one of equals first."""

    def update(self, state: G, m: Measurement) -> G:
        """γ as the step was made with."""
        return replace(state, gamma=m.gamma)

    def due(self, state: G, m: Measurement) -> bool:
        """Whether a refresh can't wait for its turn, λ having moved so far from `m.inverse_lambda`."""
        return False

    def check_interval(self, inverse_interval: int | None) -> None:  # a default
        """Refuse an inverse interval T₃ that this rule can't work with; None is one that grows."""


AnyGammaRule = GammaRule[Any]


def tied_gamma(m: Measurement) -> float:
    """√(λ + η): γ and λ as one damping strength [MG15 §6.3]."""
    return math.sqrt(m.lambda_ + m.weight_decay)
