"""What a rule is: numbers in, numbers out, and a memory of its own.

A rule is an immutable value that holds settings. What it remembers from step to step is another value, a
frozen dataclass that is a `Storable`: `init` makes it, `update` replaces it, and the optimizer keeps it,
saves it and loads it. Its fields may be numbers, strings, None, vectors in parameter space and further
`Storable` dataclasses.

All rules look at one `Measurement`. Iterations are counted from 1.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kronfac.linalg import Matrices

ParameterVector = Matrices
"""A vector in parameter space: one matrix for each unit. Rules scale, add and keep them."""

PACE = 19 / 20
"""Factor of λ and of γ² per iteration, in the paper's experiments [MG15 §6.5, §6.6]."""
TRUST = 0.5
"""Part of M's predictions that the next mini-batches have to confirm for M to be trusted."""
ROUNDING = 32
"""ε of a loss below which a change of it, predicted or measured, means nothing."""
DOMINATED = 0.5
"""Share of the curvature along a step below which most of it is λ's. Noise makes ρ −s at the least, so that
a lower one is noise of the measurement, and says nothing for a larger λ."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the optimizer knows at one point of a step; what it does not know is None.

    Several are made in a step, each with more in it than the one before.
    """

    iteration: int = 1
    """k of the step that is being made."""
    examples: int = 1
    """Examples in its mini-batch."""
    loss: float | None = None
    """The loss on it as the closure returned it."""
    weight_decay: float = 0.0
    """η, the smallest one if parameter groups differ."""
    lambda_: float = math.nan
    """λ; NaN until the first step has found it."""
    gamma: float = math.nan
    """γ of the inverse that is in use; in a measurement after the step, the γ that it was made with."""

    summed: bool = False
    """Whether the loss is a sum over the examples, not a mean."""
    precision: float = 2.0**-52
    """ε of the dtype that losses and products were computed in."""
    resolution: float = 0.0
    """The loss below which its gradient is rounding error."""

    predicted_change: float | None = None
    """M(δ) − M(0) of the step that `rho` or `next_rho` is of."""
    rho: float | None = None
    """(h(θ+δ) − h(θ)) / (M(δ) − M(0)) on the step's own mini-batch; NaN if M predicted a rise."""
    next_rho: float | None = None
    """ρ of the last step on this mini-batch, from which it was not computed; −inf if M predicted a rise,
    NaN if the loss is not finite or the step was too short to be seen."""
    curvature_share: float = 1.0
    """δᵀ(F + ηI)δ / δᵀ(F + (λ + η)I)δ: what of the model's curvature along the step is not λ's."""
    noisy: bool = False
    """Whether `next_rho` has anything to do with which examples the mini-batches hold."""
    invisible: bool = False
    """Whether the last step changed the loss by less than rounding error."""
    rejected: bool = False
    """Whether the last step was rejected."""
    elapsed: int = 1
    """Iterations from the validation before to this one."""
    confirmed: float | None = None
    """Recent average of `next_rho`, clipped to [−1, 1]; None until mini-batches have differed."""
    noise: float | None = None
    """Recent average of how much the loss differs from one mini-batch to another at the same θ, per example
    if the loss is a sum."""

    inverse_age: int = 0
    """Iterations since the last refresh of the inverse."""
    inverse_lambda: float | None = None
    """λ at that refresh."""
    drifted: bool = False
    """Whether this refresh is one that `GammaRule.due` asked for."""
    candidates: tuple[float, ...] = ()
    """The γ's that were tried in this step; empty between refreshes."""
    sampling_error: float | None = None
    """The damping γ² of the factors that makes up for their having been estimated from few examples."""
    mean_curvature: float | None = None
    """tr F̆ / dim F̆, of the size of a typical eigenvalue."""

    @property
    def trusted(self) -> bool:
        """Whether mini-batches confirm enough of M's predictions for steps to follow M alone."""
        return self.confirmed is None or self.confirmed >= TRUST

    @property
    def confidence(self) -> float:
        """`confirmed`, and 1 until that is known."""
        return 1.0 if self.confirmed is None else self.confirmed

    @property
    def lambda_dominates(self) -> bool:
        """Whether most of the curvature along the step is λ's."""
        return self.curvature_share < DOMINATED


S = TypeVar("S")


class Rule(ABC, Generic[S]):
    """A decision that is taken in every step; S is what it remembers."""

    @abstractmethod
    def init(self, m: Measurement) -> S:
        """What it remembers before the first step."""

    def update(self, state: S, m: Measurement) -> S:
        """What it remembers after `m`; a new value, `state` stays as it is."""
        return state


def require(rule: str, value: object, holds: bool) -> None:
    """Raise a ValueError if an argument breaks its rule."""
    if not holds:
        raise ValueError(f"{rule}; got {value}.")


# Sums with the few numbers that M has along a few directions.

Coefficients = Sequence[float]
Matrix = Sequence[Sequence[float]]


def inner(u: Coefficients, v: Coefficients) -> float:
    """uᵀv."""
    return sum(x * y for x, y in zip(u, v, strict=True))


def quadratic_form(Q: Matrix, c: Coefficients) -> float:
    """cᵀQc."""
    return inner(c, [inner(row, c) for row in Q])


def model_change(Q: Matrix, r: Coefficients, c: Coefficients) -> float:
    """½ cᵀQc + rᵀc."""
    return inner([inner(row, c) / 2 + r_i for row, r_i in zip(Q, r, strict=True)], c)
