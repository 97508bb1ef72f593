"""Dense Levenberg–Marquardt steps, against their definition by dense matrices."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.errors import ClosureError, UnsupportedModelError
from kronfac.physics import DenseLevenbergMarquardt, Sin, WithDerivatives
from kronfac.physics.residuals import linearize_residuals, lower_gram
from kronfac.record import record
from tests.conftest import ALGEBRA, AUTODIFF, network_of, normal

X, B = normal(30, 2), normal(8, 2, seed=1)


def solution(dtype: torch.dtype = torch.float64) -> WithDerivatives:
    torch.manual_seed(0)
    layers = nn.Linear(2, 6), Sin(), nn.Linear(6, 5), Sin(), nn.Linear(5, 1)
    return WithDerivatives(nn.Sequential(*layers).to(dtype))


def residuals(u: WithDerivatives, x: Tensor = X) -> Tensor:
    """√w r with h = ‖√w r‖², (terms,)."""
    jet = u(x.to(next(u.parameters()).dtype))
    inside = jet.second[:, 0] + jet.first[:, 0] * jet.value + 1
    boundary = u.perceptron(B.to(inside.dtype))
    return torch.cat([inside / len(x) ** 0.5, boundary * (10 / len(B)) ** 0.5]).squeeze(1)


def closure_of(u: WithDerivatives, optimizer: torch.optim.Optimizer, points=lambda: X):
    def closure() -> Tensor:
        optimizer.zero_grad()
        jet = u(points().to(next(u.parameters()).dtype))
        inside = jet.second[:, 0] + jet.first[:, 0] * jet.value + 1
        boundary = u.perceptron(B.to(inside.dtype))
        loss = kronfac.least_squares(inside) + kronfac.least_squares(boundary, 10.0)
        loss.backward()
        return loss

    return closure


def flat(u: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in u.parameters()])


def at(u: WithDerivatives, theta: Tensor) -> WithDerivatives:
    moved = copy.deepcopy(u)
    nn.utils.vector_to_parameters(theta, moved.parameters())
    return moved


def jacobian(u: WithDerivatives) -> Tensor:
    rows = [torch.autograd.grad(r, list(u.parameters()), retain_graph=True) for r in residuals(u)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def dense_step(u: WithDerivatives, lambda_: float, last: Tensor) -> tuple[Tensor, float]:
    """δ by the definition, with trials, and λ after it."""
    theta, J, r = flat(u), jacobian(u), residuals(u).detach()
    F, gradient = 2 * J.mT @ J, 2 * J.mT @ r
    D = F.diagonal() + 0.01 * F.diagonal().mean()
    D = (D / D.mean()).diag()
    h = r.square().sum()
    for trial in range(10):
        inverse = torch.linalg.inv(F + lambda_ * D)
        for centre in (0.7 * last, 0 * last):
            v = -inverse @ (gradient - lambda_ * D @ centre)
            bent = 2 / 0.1 * ((residuals(at(u, theta + 0.1 * v)).detach() - r) / 0.1 - J @ v)
            a = -inverse @ (2 * J.mT @ bent)
            if a.norm() > v.norm():
                continue
            delta, best, factor = v + a / 2, None, 1.0
            sums, gains = [1000 * h], []
            for _ in range(7):
                there = residuals(at(u, theta + delta)).detach()
                change = there.square().sum() - h
                sums.append(
                    there.square().sum() + lambda_ / 2 * (delta - centre) @ D @ (delta - centre)
                )
                if sums[-1] >= sums[-2]:
                    factor = 3.0
                    break
                if change < 0 and (best is None or change < best[1]):
                    best = delta, change
                slope = 2 * J.mT @ there + lambda_ * D @ (delta - centre)
                gains.append(slope @ inverse @ slope / 2)
                if gains[-1] < -0.1 * change:
                    factor = 1 / 3 if trial == 0 else 1.0
                    break
                if len(gains) > 1 and gains[-1] > gains[-2] / 2:
                    break
                delta = delta - inverse @ slope
            if best is not None:
                return best[0], lambda_ * factor
        lambda_ *= 3
    raise AssertionError("no step is good")


def test_steps_are_those_of_dense_matrices():
    u = solution()
    optimizer = DenseLevenbergMarquardt(u)
    closure = closure_of(u, optimizer)
    J, start = jacobian(u), flat(u)
    lambda_ = 0.01 * 2 * float(J.square().sum(dim=0).mean())
    for _ in range(15):
        before = flat(u)
        delta, lambda_ = dense_step(u, lambda_, before - start)
        optimizer.step(closure)
        assert_close(flat(u) - before, delta, rtol=1e-6, atol=1e-8)
        assert optimizer.report.lambda_ == pytest.approx(lambda_, rel=1e-12)
        start = before


def residuals_of(model: nn.Module, closure) -> tuple:
    network = network_of(model)
    with record(model, network.objective) as recording:
        closure()
    return linearize_residuals(network, recording.batch())


def test_second_derivatives_of_what_is_quadratic():
    """z = (w x)² has d²z/dt² = 2 (v x)² along v, to rounding."""
    model = nn.Linear(2, 1, bias=False).double()
    r = residuals_of(model, lambda: kronfac.least_squares(model(X).square()).backward())
    v = normal(2, seed=2)
    assert_close(r.second_derivative(v), 2 * (X @ v).square(), **AUTODIFF)


def test_several_outputs_and_targets():
    """r, J and the gradient of a mean square over outputs, and of a second loss of the same outputs."""
    model = nn.Linear(2, 3).double()
    y = normal(30, 3, seed=4)

    def closure() -> None:
        z = model(X)
        loss = nn.functional.mse_loss(z, y) + kronfac.least_squares(z[:, 0] * z[:, 1], 2.0)
        loss.backward()

    r = residuals_of(model, closure)
    W, b = model.weight, model.bias
    theta = torch.cat([W.detach(), b.detach()[:, None]], dim=1).flatten()
    inputs = torch.cat([X, torch.ones(30, 1, dtype=X.dtype)], dim=1)

    def by_hand(theta: Tensor) -> Tensor:
        z = inputs @ theta.view(3, 3).mT
        return torch.cat([(z - y).mT.flatten(), z[:, 0] * z[:, 1]])

    assert_close(r.values, by_hand(theta), **ALGEBRA)
    assert_close(r.jacobian, torch.func.jacfwd(by_hand)(theta), **AUTODIFF)
    assert_close(r.gradient.view(3, 3), torch.cat([W.grad, b.grad[:, None]], dim=1), **AUTODIFF)


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_the_lower_half_of_a_gram_matrix(size):
    A = normal(7, size)
    assert_close(lower_gram(A).tril(), (A.mT @ A).tril(), **ALGEBRA)


def test_weight_decay_is_part_of_the_objective():
    """On a linear model small λ gives ridge regression."""
    model = nn.Linear(2, 1, bias=False).double()
    y = normal(30, 1, seed=3)
    optimizer = DenseLevenbergMarquardt(model, weight_decay=0.3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = kronfac.Gaussian()(model(X), y)
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)
    ridge = torch.linalg.solve(X.mT @ X / 30 + 0.3 * torch.eye(2), X.mT @ y / 30)
    # A step has to lower the objective, which is flat to rounding within the root of its precision.
    assert_close(model.weight.detach().mT, ridge, rtol=1e-7, atol=1e-8)


def test_the_objective_never_rises():
    u = solution()
    optimizer = DenseLevenbergMarquardt(u)
    closure = closure_of(u, optimizer)
    losses = [float(optimizer.step(closure).detach()) for _ in range(25)]
    assert all(after < before for before, after in itertools.pairwise(losses))


def test_a_saved_state_goes_on_to_the_bit():
    u = solution()
    optimizer = DenseLevenbergMarquardt(u)
    closure = closure_of(u, optimizer)
    for _ in range(4):
        optimizer.step(closure)
    other = at(u, flat(u))
    resumed = DenseLevenbergMarquardt(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_closure = closure_of(other, resumed)
    for _ in range(3):
        optimizer.step(closure)
        resumed.step(resumed_closure)
    assert torch.equal(flat(u), flat(other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kfac_is_kfac_on_residuals(dtype):
    """Its steps are along its direction and the last step, however small the problem."""
    u = solution(dtype)
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    closure = closure_of(u, optimizer)
    for _ in range(5):
        optimizer.step(closure)
    assert optimizer.report.mu is not None


def test_too_many_parameters_are_refused():
    model = nn.Sequential(nn.Linear(2, 60), nn.Tanh(), nn.Linear(60, 60)).double()
    with pytest.raises(
        UnsupportedModelError, match=r"there may be 2,048; got 3,840. Use kronfac.KFAC"
    ):
        DenseLevenbergMarquardt(model)


def test_single_precision_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"float64; got a parameter in torch.float32"):
        DenseLevenbergMarquardt(solution(torch.float32))


def closure_with(u: WithDerivatives, optimizer: torch.optim.Optimizer, loss_of):
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(u.perceptron(X))
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (lambda z: z.square().mean(), "it saw no such loss"),
        (lambda z: nn.functional.huber_loss(z, torch.zeros_like(z)), "a loss of Huber"),
        (
            lambda z: kronfac.least_squares(z) + z.square().mean(),
            "not that of the sums of squares",
        ),
        (lambda z: kronfac.least_squares(z.mean(dim=0, keepdim=True)), "one row for each"),
    ],
)
def test_other_losses_are_refused(loss_of, message):
    u = solution()
    optimizer = DenseLevenbergMarquardt(u)
    with pytest.raises((ClosureError, UnsupportedModelError), match=message):
        optimizer.step(closure_with(u, optimizer, loss_of))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0}, "trials is 1 or more"),
        ({"corrections": -1}, "corrections is 0 or more"),
        ({"momentum": 1.0}, "momentum is at least 0 and below 1"),
        ({"lambda_": 0.0}, "lambda_ is positive"),
        ({"weight_decay": -1.0}, "weight_decay is at least 0"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DenseLevenbergMarquardt(solution(), **options)
