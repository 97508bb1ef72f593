"""The equations' solutions solve them, and the comparison runs from start to page."""

from pathlib import Path

import pytest
import torch
from torch.func import hessian, jacrev, vmap

from kronfac.physics import Jet
from kronfac_experiments.bench.physics import PhysicsConfig, physics_command
from kronfac_experiments.bench.physics.equations import EQUATIONS
from kronfac_experiments.bench.physics.methods import LAST_RATE, METHODS
from kronfac_experiments.bench.physics.runs import MARKS, run_one


@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)
def test_the_solution_has_no_residual(equation):
    x = equation.points[0][:50]
    H = vmap(hessian(lambda p: equation.exact(p[None])[0]))(x).movedim(1, -1)
    first = vmap(jacrev(lambda p: equation.exact(p[None])[0]))(x).mT
    if equation.second == "laplacian":
        second = H.diagonal(dim1=1, dim2=2).sum(-1)[:, None]
    else:
        second = torch.stack([H[:, i, j] for i, j in equation.second], dim=1)
    residual = equation.residual(Jet(equation.exact(x), first, second), x)
    assert residual.abs().max() < 1e-10


@pytest.mark.parametrize("equation", EQUATIONS.values(), ids=EQUATIONS)
def test_boundary_points_are_on_faces_that_have_values(equation):
    _, boundary, _ = equation.points
    low = torch.zeros(equation.inputs, dtype=torch.float64)
    high = torch.ones(equation.inputs, dtype=torch.float64)
    low[-1], high[-1] = equation.box
    on_face = (boundary == low) | (boundary == high)
    assert (on_face.sum(dim=1) == 1).all()
    if equation.timed:
        assert not (boundary[:, 0] == 1).any()
    assert not torch.isnan(equation.values[0]).any()


def test_burgers_starts_as_it_should():
    x = torch.tensor([[0.0, -0.5], [0.0, 0.25]], dtype=torch.float64)
    expected = -(torch.pi * x[:, 1:]).sin()
    torch.testing.assert_close(EQUATIONS["burgers"].exact(x), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_gets_nearer_to_the_solution(method):
    setting = method.grid[0] if method.grid else None
    trial = run_one(EQUATIONS["heat"], method, setting, 0, 0.5)
    assert len(trial.errors) == len(trial.losses) == len(MARKS)
    assert trial.losses[-1] < trial.losses[0]
    assert trial.steps > 0


def test_the_cosine_ends_at_the_last_rate():
    adam = METHODS[-1]
    assert adam.rate(0.1, 0.0) == 0.1
    assert adam.rate(0.1, 1.0) == pytest.approx(0.1 * LAST_RATE)
    assert METHODS[0].rate(None, 0.5) is None


def test_from_the_command_to_the_page(tmp_path: Path):
    page = tmp_path / "physics.md"
    config = PhysicsConfig(
        equations=("heat",), seconds=0.2, seeds=1, output=page, run_dir=tmp_path / "runs"
    )
    written = physics_command(config)
    assert page in written
    assert "| heat |" in page.read_text()
    assert page.with_suffix(".png").stat().st_size > 1000


def test_of_one_method_alone(tmp_path: Path):
    page = tmp_path / "physics.md"
    config = PhysicsConfig(
        equations=("heat",),
        methods=("kfac",),
        seconds=0.2,
        seeds=1,
        output=page,
        run_dir=tmp_path / "runs",
    )
    physics_command(config)
    text = page.read_text()
    assert "| equation | K-FAC |" in text
    assert "Adam" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("sgd",)}, "got sgd"),
        ({"equations": ("wave",)}, "got wave"),
        ({"seconds": 0.0}, "--seconds is positive"),
        ({"seeds": 0}, "--seeds is 1 to 100"),
        ({"output": Path("page.txt")}, "is a .md file"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PhysicsConfig(**options)
