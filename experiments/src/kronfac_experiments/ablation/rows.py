"""What [MG15] says of its parts without showing it, and EKFAC, as rows: K-FAC with one thing changed.

Every row is K-FAC with the block-diagonal inverse and the constants of `presets.paper()` but for λ₀,
and the change that its name says. A row may have several variants, of which the best counts, if
the thing that takes K-FAC's place has a constant to choose by hand.

Heskes computed G exactly and afresh; his row here has K-FAC's statistics (a sampled target a case, moving
averages, τ₁ = 1/8), and is about damping alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import presets
from kronfac.control import (
    Coefficients,
    FixedGamma,
    LevenbergMarquardt,
    Matrix,
    Measurement,
    QuadraticModel,
    RawStep,
    Step,
    StepState,
    TiedGamma,
)
from kronfac.curvature import (
    ApproximateInverse,
    BlockDiagonalInverse,
    Curvature,
    DampedInverse,
    EigenvalueCorrectedInverse,
    EmpiricalFisher,
    ExactTikhonov,
    FactoredTikhonov,
    SampledFisher,
)
from kronfac.curvature.damping import Norm
from kronfac.objective.base import Likelihood
from kronfac.optimizer import KFAC
from kronfac.storage import Storable
from kronfac_experiments.config import FirstOrderOptions, KfacOptions, TrainConfig
from kronfac_experiments.optimizers import (
    FirstOrderStepper,
    KfacStepper,
    Stepper,
    StepperMaker,
)

WHOLE = "K-FAC"
"""The row that most others are compared with."""
SEVERAL = 4
"""Sampled targets a case, if it is not one."""
LONG = 5
"""Times as many iterations for first-order rows, whose iterations do less and cost less."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        name: What is different.
        section: Section of the paper, where it is stated.
        variants: The constants to choose by hand, in words, and how the optimizer is made with them;
            none for the averaged iterates of the row it is compared with.
        against: The row that it is compared with.
        stretch: How many times the iterations of the others.
    """

    name: str
    section: str
    variants: dict[str, StepperMaker]
    against: str = WHOLE
    stretch: int = 1


def _kfac(*, lambda_factor: float = 1.0, samples: int = 1, **changes: Any) -> StepperMaker:
    """K-FAC with the paper's constants, λ₀ of the configuration times a factor, and these changes."""

    def make(config: TrainConfig, model: nn.Module, loss: Likelihood) -> Stepper:
        assert config.kfac.lambda0 is not None
        settings = presets.paper() | {
            "damping": LevenbergMarquardt(lambda_=lambda_factor * config.kfac.lambda0),
            "fisher": SampledFisher(seed=config.seed, samples=samples),
        }
        eta = config.weight_decay or 0.0
        return KfacStepper(KFAC(model, loss, weight_decay=eta, **settings | changes))

    return make


def _nesterov(lr: float) -> StepperMaker:
    def make(config: TrainConfig, model: nn.Module, loss: Likelihood) -> Stepper:
        # μ rises to 1 − 1/(2n) in its n-th 250 iterations, so μ_max hardly matters in so few.
        first_order = FirstOrderOptions(lr, mu_max=0.99)
        config = replace(config, optimizer="nag", kfac=KfacOptions(), first_order=first_order)
        return FirstOrderStepper(config, model, loss)

    return make


def _only(maker: StepperMaker) -> dict[str, StepperMaker]:
    return {"": maker}


def _norm(norm: Norm) -> BlockDiagonalInverse:
    return BlockDiagonalInverse(tikhonov=FactoredTikhonov(norm))


EXACT = BlockDiagonalInverse(tikhonov=ExactTikhonov())
NO_MOMENTUM = "no momentum"
NESTEROV = "Nesterov momentum on the gradient"


@dataclass(frozen=True)
class Identity(Storable):
    """V ↦ V, for matrices V of `size` numbers."""

    size: int

    def mv(self, V: Tensor) -> Tensor:
        """A copy, which the caller may overwrite."""
        return V.clone()

    def to_dense(self) -> Tensor:
        """I."""
        return torch.eye(self.size)


@dataclass(frozen=True)
class _Identities:
    sizes: tuple[int, ...]

    def damped(self, gamma: float) -> DampedInverse:
        """The same for every γ."""
        return DampedInverse(tuple(map(Identity, self.sizes)))


@dataclass(frozen=True)
class NoInverse(ApproximateInverse):
    """No curvature in the direction: Δ = −∇h. The quadratic model still has the exact Fisher."""

    def prepare(self, curvature: Curvature) -> _Identities:
        """The identity of every unit."""
        return _Identities(tuple(block.size for block in curvature.blocks))


@dataclass(frozen=True)
class PlainStep(RawStep):
    """δ = Δ, and M with the approximate Fisher in place of the exact one: M(Δ) − M(0) = ½ ∇hᵀΔ.

    So λ is adapted by the model that Δ minimises, as §6.2 has it; by the exact one the raw Δ may be
    predicted to make things worse.
    """

    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        """α = 1."""
        return Step((self.alpha,), r[0] / 2)


def _heskes(gamma: float) -> StepperMaker:
    return _kfac(gamma=FixedGamma(gamma), step_size=RawStep(), inverse=_norm("one"))


def _plain_tikhonov(factor: float) -> StepperMaker:
    return _kfac(inverse=EXACT, gamma=TiedGamma(), step_size=PlainStep(), lambda_factor=factor)


ROWS: tuple[Row, ...] = (
    Row(WHOLE, "", _only(_kfac())),
    Row("block-tridiagonal inverse", "§13", _only(_kfac(inverse="block_tridiagonal"))),
    Row("EKFAC", "George et al. 2018", _only(_kfac(inverse="ekfac"))),
    Row(
        "EKFAC with exact Tikhonov (S + γ²)",
        "George et al. 2018",
        _only(_kfac(inverse=EigenvalueCorrectedInverse(ExactTikhonov()))),
        against="EKFAC",
    ),
    Row(NO_MOMENTUM, "§7, §13", _only(_kfac(step_size=QuadraticModel(momentum=False)))),
    Row(
        "plain Tikhonov (A ⊗ G + (λ + η)I), no re-scaling, no momentum",
        "§6.2",
        {f"λ₀ × {factor:g}": _plain_tikhonov(factor) for factor in (1, 10, 100)},
        against=NO_MOMENTUM,
    ),
    Row("exact Tikhonov (A ⊗ G + γ²I)", "§6.3", _only(_kfac(inverse=EXACT))),
    Row("π = 1", "§6.3", _only(_kfac(inverse=_norm("one")))),
    Row("π by the Frobenius norm", "§6.3", _only(_kfac(inverse=_norm("frobenius")))),
    Row("π by the spectral norm", "§6.3", _only(_kfac(inverse=_norm("spectral")))),
    Row("γ = √(λ + η), no γ of its own", "§6.6", _only(_kfac(gamma=TiedGamma()))),
    Row(
        "γ judged by h instead of M",
        "§6.6",
        _only(_kfac(gamma=replace(presets.paper()["gamma"], criterion="objective"))),
    ),
    Row(f"{SEVERAL} sampled targets a case", "§5", _only(_kfac(samples=SEVERAL))),
    Row("empirical Fisher", "§5", _only(_kfac(fisher=EmpiricalFisher()))),
    Row("τ₂ = 1 instead of ¼", "§8", _only(_kfac(fisher_fraction=1.0))),
    Row("iterates averaged over the second half", "§13", {}),
    Row(
        "Heskes' damping: fixed γ, no π, no re-scaling, no momentum",
        "§11",
        {f"γ = {gamma:g}": _heskes(gamma) for gamma in (0.3, 1, 3, 10)},
        against=NO_MOMENTUM,
    ),
    Row(
        NESTEROV,
        "§13",
        {f"ε = {lr:g}": _nesterov(lr) for lr in (0.003, 0.01, 0.03)},
        stretch=LONG,
    ),
    Row(
        "K-FAC's momentum on the gradient",
        "§13",
        _only(_kfac(inverse=NoInverse(), gamma=FixedGamma())),
        against=NESTEROV,
        stretch=LONG,
    ),
)


def rows_named(words: Sequence[str]) -> tuple[Row, ...]:
    """The rows with one of the words in their names, and those they are compared with; all for none.

    Raises:
        ValueError: a word is in no name.
    """
    for word in words:
        if not any(_in(word, row) for row in ROWS):
            raise ValueError(f"No row has {word!r} in its name: {'; '.join(r.name for r in ROWS)}.")
    by_name = {row.name: row for row in ROWS}
    needed: set[str] = set()
    names = [row.name for row in ROWS if not words or any(_in(word, row) for word in words)]
    while names:
        name = names.pop()
        if name not in needed:
            needed.add(name)
            names.append(by_name[name].against)
    return tuple(row for row in ROWS if row.name in needed)


def _in(word: str, row: Row) -> bool:
    exact = [other.name for other in ROWS if other.name.lower() == word.lower()]
    return row.name in exact if exact else word.lower() in row.name.lower()
