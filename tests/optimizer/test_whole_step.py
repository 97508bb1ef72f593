"""Many steps of KFAC against the paper's pseudocode with dense matrices."""

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, GammaSearch, Intervals, LevenbergMarquardtRule, QuadraticModel
from kronfac.extend import First
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.pseudocode import Pseudocode
from tests.optimizer.runs import INVERSES, agree, closure_of, targets_for

passes = passes_either_way()

STEPS = 45
# Loss and T₁, T₂, T₃.
CASES = {
    "mse_mean": (nn.MSELoss(), (5, 20, 10)),
    "mse_sum": (nn.MSELoss(reduction="sum"), (2, 6, 3)),
    "bce_mean": (nn.BCEWithLogitsLoss(), (5, 20, 10)),
    "cross_entropy": (nn.CrossEntropyLoss(), (5, 20, 10)),
    "bernoulli": (kronfac.Bernoulli(), (2, 6, 3)),
}


def mini_batches(loss: nn.Module, outputs: int, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Mini-batches that vary and grow, with a small one now and then."""
    x = normal(400, 4, seed=1)
    teacher = mlp([4, 6, outputs], seed=9, gain=2.0)
    y = targets_for(loss, teacher(x).detach(), seed=2)
    batches = []
    for k in range(1, steps + 1):
        m = 5 + k % 3 if k % 11 == 0 else 16 + k // 2 + 5 * (k % 4)
        rows = torch.randperm(400, generator=torch.Generator().manual_seed(k))[:m]
        batches.append((x[rows], y[rows]))
    return batches


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_pseudocode(case, inverse):
    loss, (T1, T2, T3) = CASES[case]
    model = mlp([4, 5, 4, 3], seed=3)
    expected = Pseudocode(
        model,
        loss,
        tridiagonal=inverse == "block_tridiagonal",
        eta=1e-2,
        lambda_=0.1,
        T1=T1,
        T2=T2,
        T3=T3,
        tau1=0.3,
        tau2=0.6,
        gamma_min=0.1,
    )
    optimizer = KFAC(
        model,
        loss,
        inverse=inverse,
        weight_decay=1e-2,
        fisher="exact",
        damping=LevenbergMarquardtRule(lambda_=0.1, interval=T1),
        gamma=GammaSearch(interval=T2),
        step_rule=QuadraticModel(bounded=False, memory=None),
        intervals=Intervals(First(0.3), First(0.6), inverse_interval=T3),
    )
    seen = [agree(optimizer, expected, x, y) for x, y in mini_batches(loss, 3)]

    # That the rules were put to the test: γ moved, momentum was in use, λ fell, stayed and rose.
    assert len({numbers.gamma for numbers in seen}) > 1
    assert all(numbers.mu is not None for numbers in seen[1:])
    rho = torch.tensor([numbers.rho for numbers in seen if numbers.rho is not None])
    assert len(rho) == STEPS // T1
    assert (rho > 3 / 4).any()
    if case == "mse_sum":
        assert ((rho >= 1 / 4) & (rho <= 3 / 4)).any()
        assert (rho < 1 / 4).any()


@pytest.mark.parametrize("inverse", INVERSES)
def test_a_network_without_biases_and_a_closure_of_the_users_own(inverse):
    loss = nn.MSELoss()
    model = mlp([4, 5, 4, 3], seed=3, bias=False, activation="sigmoid")
    settings = {"lambda_": 0.1, "T1": 1, "T2": 4, "T3": 2}
    tridiagonal = inverse == "block_tridiagonal"
    expected = Pseudocode(model, loss, tridiagonal=tridiagonal, gamma_min=1e-4, **settings)
    optimizer = KFAC(
        model,
        loss,
        inverse=inverse,
        fisher="exact",
        damping=LevenbergMarquardtRule(lambda_=0.1, interval=1),
        gamma=GammaSearch(interval=4),
        step_rule=QuadraticModel(bounded=False, memory=None),
        intervals=Intervals(inverse_interval=2),
    )
    for x, y in mini_batches(loss, 3, steps=14):
        agree(optimizer, expected, x, y, closure_of(optimizer, loss, x, y))


@pytest.mark.parametrize("inverse", INVERSES)
def test_a_change_of_weight_decay_takes_effect_at_once(inverse):
    loss = nn.MSELoss()
    model = mlp([4, 5, 4, 3], seed=3)
    tridiagonal = inverse == "block_tridiagonal"
    optimizer = KFAC(
        model,
        loss,
        inverse=inverse,
        fisher="exact",
        damping=LevenbergMarquardtRule(lambda_=0.5, interval=2),
        gamma=GammaSearch(interval=6, minimum=0.1),
        intervals=Intervals(inverse_interval=3),
    )
    expected = Pseudocode(
        model, loss, tridiagonal=tridiagonal, lambda_=0.5, T1=2, T2=6, T3=3, gamma_min=0.1
    )
    decays = [0.0, 0.0, 0.3, 0.3, 0.3, 0.02, 0.02, 0.0]
    for decay, (x, y) in zip(decays, mini_batches(loss, 3, steps=8), strict=True):
        optimizer.param_groups[0]["weight_decay"] = expected.eta = decay
        agree(optimizer, expected, x, y)


@pytest.mark.parametrize("inverse", INVERSES)
def test_an_activation_that_works_in_place_changes_nothing(inverse):
    loss = nn.MSELoss()
    runs = []
    for in_place in (False, True):
        model = mlp([4, 5, 4, 3], activation=lambda flag=in_place: nn.ReLU(inplace=flag), seed=3)
        optimizer = KFAC(model, loss, inverse=inverse, fisher="exact", weight_decay=1e-2)
        for x, y in mini_batches(loss, 3, steps=6):
            optimizer.step(optimizer.closure(x, y))
        runs.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-10, atol=1e-12)
