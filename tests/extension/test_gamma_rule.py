"""A rule for γ with a memory of its own, made from public names: γ goes down and up again."""

from dataclasses import dataclass, replace

from torch import nn

import kronfac
from kronfac.testing import check_gamma_rule
from tests.conftest import mlp, normal
from tests.optimizer.pseudocode import Pseudocode
from tests.optimizer.runs import agree


@dataclass(frozen=True)
class CyclicState(kronfac.extend.GammaState):
    refreshes: int = 0


@dataclass(frozen=True)
class CyclicGamma(kronfac.extend.GammaRule[CyclicState]):
    period: int = 3

    def init(self, m: kronfac.extend.Measurement) -> CyclicState:
        return CyclicState(gamma=1.0)

    def candidates(self, state: CyclicState, m: kronfac.extend.Measurement) -> tuple[float, ...]:
        return (2.0 ** -(state.refreshes % self.period),)

    def update(self, state: CyclicState, m: kronfac.extend.Measurement) -> CyclicState:
        return replace(state, gamma=m.gamma, refreshes=state.refreshes + len(m.candidates))


class Dense(Pseudocode):
    """The paper's step with every matrix written out; at T₃ = 1 iteration k is the k-th refresh."""

    def candidates(self) -> list[float]:
        return [2.0 ** -((self.k - 1) % 3)]


def test_it_conforms():
    check_gamma_rule(CyclicGamma())


def test_it_changes_the_step_as_computed_densely_and_is_saved_with_the_state():
    def optimizer_of(model: nn.Module) -> kronfac.KFAC:
        damping, step = (
            kronfac.LevenbergMarquardtRule(0.5, interval=2),
            kronfac.QuadraticModel(bounded=False, memory=None),
        )
        settings = {
            "fisher": "exact",
            "damping": damping,
            "step_rule": step,
            "intervals": kronfac.Intervals(inverse_interval=1),
        }
        return kronfac.KFAC(model, loss, gamma=CyclicGamma(), **settings)

    model, loss = mlp([4, 5, 3], seed=3), nn.MSELoss(reduction="sum")
    optimizer, expected = optimizer_of(model), Dense(model, loss, lambda_=0.5, T1=2, T3=1)
    for k in range(8):
        agree(optimizer, expected, normal(15, 4, seed=k), normal(15, 3, seed=50 + k))
        assert optimizer.report.gamma == 2.0 ** -(k % 3)
        continued = optimizer_of(mlp([4, 5, 3], seed=9))
        continued.model.load_state_dict(optimizer.model.state_dict())
        continued.load_state_dict(optimizer.state_dict())
        optimizer = continued
