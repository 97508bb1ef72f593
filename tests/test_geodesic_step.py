"""Steps that minimise M over all directions, against dense matrices, and when there are any."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.geodesic_step import lower_gram
from kronfac.linearization.finite_difference import second_derivative
from kronfac.network import record
from kronfac.physics import Sin, WithDerivatives
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


def closure_of(u: WithDerivatives, optimizer: kronfac.KFAC, points=lambda: X):
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
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    closure = closure_of(u, optimizer)
    for _ in range(3):  # the first is K-FAC's own, and its λ is moved when it has been validated
        start = flat(u)
        optimizer.step(closure)
    for _ in range(12):
        before = flat(u)
        delta, lambda_ = dense_step(u, optimizer._state.damping.lambda_, before - start)
        optimizer.step(closure)
        assert_close(flat(u) - before, delta, rtol=1e-6, atol=1e-8)
        assert optimizer.report.lambda_ == pytest.approx(lambda_, rel=1e-12)
        start = before


def test_second_derivatives_of_what_is_quadratic():
    """z = (w x)² has d²z/dt² = 2 (v x)² along v, to rounding."""
    model = nn.Linear(2, 1, bias=False).double()
    network = network_of(model)
    with record(model, network.objective) as recording:
        kronfac.least_squares(model(X).square()).backward()
    (part,) = recording.batch().passes
    v = (normal(1, 2, seed=2),)
    s, t = (X @ W.detach().mT for W in (model.weight, v[0]))
    (found,) = second_derivative(network, part, v, [s.square()], [2 * s * t])
    assert_close(found, 2 * t.square(), **AUTODIFF)


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_the_lower_half_of_a_gram_matrix(size):
    A = normal(7, size)
    assert_close(lower_gram(A).tril(), (A.mT @ A).tril(), **ALGEBRA)


def wholly(optimizer: kronfac.KFAC, closure, steps: int = 5) -> bool:
    """Whether the last step is along one direction, and a whole one."""
    for _ in range(steps):
        optimizer.step(closure)
    return optimizer.report.mu is None and optimizer.report.alpha == 1


def test_it_is_the_default():
    u = solution()
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    assert wholly(optimizer, closure_of(u, optimizer))


@pytest.mark.parametrize(
    "options",
    [
        {"step_size": kronfac.QuadraticModel()},
        {"step_size": kronfac.QuadraticModel(whole=kronfac.GeodesicSteps(limit=58))},
        {"statistics_fraction": 1.0},
        {"fisher_fraction": 1.0},
        {"clip": 10.0},
        {"lr": 0.5},
        {"damping": kronfac.FixedDamping(0.1)},
    ],
)
def test_not_if_another_step_is_asked_for(options):
    u = solution()
    assert sum(p.numel() for p in u.parameters()) == 59
    optimizer = kronfac.KFAC(u, nn.MSELoss(), **options)
    assert not wholly(optimizer, closure_of(u, optimizer))


def test_not_in_single_precision():
    u = solution(torch.float32)
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    assert not wholly(optimizer, closure_of(u, optimizer))


@pytest.mark.filterwarnings("ignore:KFAC rejected a step")
def test_not_if_points_are_drawn_anew():
    u = solution()
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    assert wholly(optimizer, closure_of(u, optimizer))
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(30, 2, generator=generator, dtype=torch.float64)  # noqa: E731
    x = draw()
    closure = closure_of(u, optimizer, lambda: x)
    for _ in range(4):
        x = draw()
        optimizer.step(closure)
    assert optimizer.report.mu is not None


def test_the_objective_never_rises():
    u = solution()
    optimizer = kronfac.KFAC(u, nn.MSELoss())
    closure = closure_of(u, optimizer)
    optimizer.step(closure)
    losses = [float(optimizer.step(closure).detach()) for _ in range(25)]
    assert all(after < before for before, after in itertools.pairwise(losses[1:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 1 or more"),
        ({"trials": 0}, "trials is 1 or more"),
        ({"corrections": -1}, "corrections is 0 or more"),
        ({"momentum": 1.0}, "momentum is at least 0 and below 1"),
        ({"factor": 1.0}, "factor is above 1"),
        ({"far": 1.0}, "far is above 1"),
        ({"settled": 0.0}, "settled is between 0 and 1"),
        ({"shrink": 1.0}, "shrink is between 0 and 1"),
        ({"bend": 0.0}, "bend is positive"),
        ({"floor": 0.0}, "floor is positive"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        kronfac.GeodesicSteps(**options)
