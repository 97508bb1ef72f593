"""PINA: Poisson's equation, with derivatives that K-FAC sees, and targets without any."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac.errors import UnsupportedModelError
from kronfac.integrations import pina as integration
from tests.networks import libraries

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec", "ignore::UserWarning:lightning", "ignore:.*have no `val_dataloader`"
)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


PARTS = ("domain", "equation.zoo", "model", "operator", "problem.zoo", "solver", "weighting")


@pytest.fixture(scope="module")
def pina() -> Any:
    libraries.import_torchvision()
    kept = warnings.formatwarning
    with warnings.catch_warnings():
        library = pytest.importorskip("pina")
        for part in PARTS:
            importlib.import_module(f"pina.{part}")
    warnings.formatwarning = kept  # PINA sets its own, and filters, for everybody
    return library


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def exact(x: Any) -> Any:
    return torch.sin(torch.pi * x["x"])


def problem(pina: Any, equation: Any = None, **others: Any) -> Any:
    """u'' = −π² sin πx on [−1, 1], with u = 0 at the ends."""

    class Poisson(pina.problem.SpatialProblem):  # type: ignore[misc, name-defined]
        output_variables = integration.variables(["u"], ["x"])
        spatial_domain = pina.domain.CartesianDomain({"x": [-1.0, 1.0]})
        domains = {"inside": spatial_domain, "ends": spatial_domain.partial()}  # noqa: RUF012
        conditions = {  # noqa: RUF012
            "inside": pina.Condition(
                domain="inside",
                equation=pina.equation.Equation(
                    equation or (lambda x, u: u["ddu"] + torch.pi**2 * exact(x))
                ),
            ),
            "ends": pina.Condition(
                domain="ends", equation=pina.equation.zoo.FixedValue(0.0, components=["u"])
            ),
            **others,
        }

    made = Poisson()
    made.discretise_domain(100, "grid", domains=["inside"])
    made.discretise_domain(2, "grid", domains=["ends"])
    return made


def perceptron(inputs: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def train(pina: Any, task: Any, net: Any, steps: int, **options: Any) -> Any:
    solver = pina.solver.PhysicsInformedSingleModelSolver(
        task,
        net,
        optimizer=integration.kfac(task, net),
        weighting=pina.weighting.ScalarWeighting({"ends": 100.0}),
    )
    pina.Trainer(solver, max_epochs=steps, **options, **QUIET).train()
    return solver


def error(pina: Any, solver: Any) -> float:
    x = pina.LabelTensor(torch.linspace(-1, 1, 100).unsqueeze(1), ["x"])
    with torch.no_grad():
        return float((solver(x)["u"] - exact(x)).abs().max())


def test_it_solves_poissons_equation(pina):
    net = integration.network(perceptron(), ["x"])
    solver = train(pina, problem(pina), net, steps=60)
    report = solver.optimizer.instance.report
    assert report.iteration == 60
    assert report.events == ()  # the losses were seen
    assert report.loss < 0.02
    assert error(pina, solver) < 0.02


@pytest.mark.slow
def test_mini_batches_of_points(pina):
    net = integration.network(perceptron(), ["x"])
    solver = train(pina, problem(pina), net, steps=150, batch_size=50)
    assert solver.optimizer.instance.report.iteration > 150
    assert error(pina, solver) < 0.02


def test_the_columns_are_what_pinas_operators_compute(pina):
    names = ["x", "y"]
    second = [("x", "x"), ("x", "y")]
    plain = perceptron(2)
    x = pina.LabelTensor(torch.rand(7, 2), names).requires_grad_()
    u = pina.LabelTensor(plain(x), ["u"])
    slopes = pina.operator.grad(u, x)
    bends = pina.operator.grad(slopes, x)
    pairs = pina.LabelTensor(
        integration.network(plain, names, second)(x),
        integration.variables(["u"], names, second),
    )
    for found in (u, slopes, bends):
        for name in set(found.labels) & set(pairs.labels):
            same(pairs[name], found[name])
    assert {"u", "dudx", "dudy", "ddudxdx", "ddudxdy"} == set(pairs.labels)
    whole = pina.LabelTensor(
        integration.network(plain, names)(x), integration.variables(["u"], names)
    )
    same(whole["ddu"], pina.operator.laplacian(u, x))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.as_subclass(Tensor), expected.as_subclass(Tensor), rtol=1e-10, atol=1e-12
    )


def test_targets_without_derivatives(pina):
    x = pina.LabelTensor(torch.rand(256, 2), ["x", "y"])
    y = pina.LabelTensor((exact(x) * x["y"]).as_subclass(Tensor), ["u"])
    task = pina.problem.zoo.SupervisedProblem(x, y)
    net = pina.model.FeedForward(2, 1, layers=[16, 16])
    solver = pina.solver.SupervisedSingleModelSolver(
        task, net, optimizer=integration.kfac(task, net), use_lt=False
    )
    pina.Trainer(solver, max_epochs=8, batch_size=64, **QUIET).train()
    assert solver.optimizer.instance.report.events == ()
    with torch.no_grad():
        assert float((net(x.tensor) - y.tensor).square().mean()) < 1e-3


def test_derivatives_that_k_fac_can_not_see_are_refused(pina):
    with pytest.raises(UnsupportedModelError, match=r"'inside' has an equation.*FeedForward"):
        integration.kfac(problem(pina), pina.model.FeedForward(1, 3, layers=[8]))
    net = integration.network(perceptron(), ["x"])
    with pytest.raises(TypeError, match="NoneType"):  # PINA's, from what does not depend on x
        train(pina, problem(pina, lambda x, u: pina.operator.laplacian(u["u"], x)), net, steps=1)
    with pytest.raises(ValueError, match="by inputs, here x; got 't'"):
        integration.network(perceptron(), ["x"], [("x", "t")])


def test_targets_that_would_be_compared_with_derivatives_are_refused(pina):
    x = pina.LabelTensor(torch.rand(5, 1), ["x"])
    data = pina.Condition(input=x, target=pina.LabelTensor(exact(x).as_subclass(Tensor), ["u"]))
    net = integration.network(perceptron(), ["x"])
    with pytest.raises(UnsupportedModelError, match=r"'data' has targets of 1 columns.* all 3"):
        integration.kfac(problem(pina, data=data), net)


def test_unknown_parameters_are_refused(pina):
    net = integration.network(perceptron(2), ["x", "y"])
    with pytest.raises(UnsupportedModelError, match="unknown parameters of an InverseProblem"):
        integration.kfac(pina.problem.zoo.InversePoisson2DSquareProblem(load=False), net)
