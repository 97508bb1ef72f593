"""Bad input gets an error that names the culprit, and changes nothing."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

import kronfac
from kronfac import (
    KFAC,
    Blocks,
    FixedDamping,
    GammaSearch,
    Intervals,
    LevenbergMarquardtRule,
)
from kronfac.errors import ClosureError, TargetError
from kronfac.extend import (
    BlockDiagonalInverse,
    SampledFisher,
)
from tests.conftest import mlp, normal, passes_either_way
from tests.optimizer.runs import INVERSES, Snapshot, assert_no_hooks, closure_of, mean_square

passes = passes_either_way()

M = 6


def linear(d_in: int, d_out: int) -> nn.Linear:
    return nn.Linear(d_in, d_out, dtype=torch.float64)


def trained(model: nn.Module | None = None, loss: nn.Module | None = None, **settings: Any) -> KFAC:
    """After two steps on 4-5-3 with squared error, so that there is a state to lose."""
    optimizer = KFAC(
        mlp([4, 5, 3]) if model is None else model,
        loss or nn.MSELoss(),
        weight_decay=1e-2,
        # The adaptive rule judges the last step before it looks at the gradient, and keeps that.
        **{"damping": LevenbergMarquardtRule()} | settings,
    )
    for step in range(2):
        optimizer.step(optimizer.closure(normal(M, 4, seed=step), normal(M, 3, seed=9)))
    return optimizer


# ----------------------------------------------------------------------------------------- models


class Wired(nn.Module):
    """Layers of these shapes, and a function of them and x for the forward pass."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **shapes: tuple[int, int]) -> None:
        super().__init__()
        self.wiring = forward
        for name, shape in shapes.items():
            self.add_module(name, linear(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


def residual() -> Wired:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.bottom(x).tanh()
        return m.top(h + m.middle(h).tanh())

    return Wired(forward, bottom=(4, 5), middle=(5, 5), top=(5, 3))


def one_idle() -> Wired:
    return Wired(lambda m, x: m.top(m.bottom(x).tanh()), bottom=(4, 5), idle=(5, 5), top=(5, 3))


def one_idle_and_one_used_twice() -> Wired:
    """As many calls as layers, but not one each."""
    return Wired(
        lambda m, x: m.top(m.shared(m.shared(x).tanh()).tanh()),
        idle=(4, 4),
        shared=(4, 4),
        top=(4, 3),
    )


def without_the_last_bias() -> nn.Module:
    """Of a layer that has some gradients the parameters without one are named."""
    model = mlp([4, 5, 3])
    model.forward = lambda x: model[1](model[0](x)) @ model[2].weight.mT
    return model


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("momentum", r"finds μ itself.*QuadraticModel\(momentum=False\)"),
        ("betas", "ema_decay"),
        ("average_decay", "AveragedModel"),
        ("verbose", "kronfac.plan"),
        ("anything", "help"),
    ],
)
def test_an_argument_of_another_optimizer_is_answered_with_a_remedy(name, remedy):
    with pytest.raises(TypeError, match=f"KFAC has no argument '{name}'; got {name}=0.9.*{remedy}"):
        KFAC(mlp([4, 5, 3]), nn.MSELoss(), **{name: 0.9})


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize(
    ("make", "idle"),
    [
        (one_idle, "idle"),
        (one_idle_and_one_used_twice, "idle"),
        (without_the_last_bias, "2.bias"),
    ],
)
def test_parameters_that_are_not_used_are_named_once_and_stay(make, idle, inverse):
    model = make()
    unused = [p for name, p in model.named_parameters() if name.startswith(idle)]
    before = [p.detach().clone() for p in unused]
    optimizer = KFAC(model, nn.MSELoss(), inverse=inverse, weight_decay=1e-2)
    closure = closure_of(optimizer, nn.MSELoss(), normal(M, 4), normal(M, 3, seed=1))
    with pytest.warns(UserWarning, match=f"left no gradient in '{idle}'"):
        first = float(optimizer.step(closure).detach())
    for _ in range(10):  # warnings are errors
        last = float(optimizer.step(closure).detach())
    assert last < 0.5 * first
    assert all(torch.equal(*pair) for pair in zip(before, unused, strict=True))


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_some_mini_batches_leave_out_is_trained_by_the_others(first):
    """As with LayerDrop."""
    full, skips = residual(), False
    model = Wired(lambda m, x: m.full.top(m.full.bottom(x).tanh()) if skips else m.full(x))
    model.add_module("full", full)
    optimizer = KFAC(model, nn.MSELoss())
    x, y = normal(M, 4), normal(M, 3, seed=1)
    before, losses = full.middle.weight.detach().clone(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            skips = (step % 2 == 0) == first
            losses.append(float(optimizer.step(closure_of(optimizer, nn.MSELoss(), x, y)).detach()))
    (warning,) = caught
    assert "left no gradient in 'full.middle'" in str(warning.message)
    assert not torch.equal(full.middle.weight, before)
    assert losses[-1] < losses[0]
    assert losses[-2] < losses[1]


def test_the_tridiagonal_inverse_on_more_than_vectors_is_the_block_diagonal_one():
    found = []
    for inverse in INVERSES:
        optimizer = KFAC(mlp([4, 5, 3]), nn.MSELoss(), inverse=inverse)
        optimizer.step(optimizer.closure(normal(M, 2, 4), normal(M, 2, 3)))
        found.append(nn.utils.parameters_to_vector(optimizer.model.parameters()))
    assert_close(*found, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------- targets


ONES = torch.ones(M, 3, dtype=torch.float64)
EITHER = (TargetError, ValueError, RuntimeError)
"""The error may be torch's own."""
TARGETS: dict[str, tuple[nn.Module, int, Tensor, Any, str]] = {
    "broadcast, Gaussian": (kronfac.Gaussian(), 1, ONES[:, 0], TargetError, r"Gaussian.*\(6, 1\)"),
    "indices of floats": (
        kronfac.Categorical(),
        3,
        ONES[:, 0],
        TargetError,
        r"\(6,\), torch.float64",
    ),
    "another width": (nn.MSELoss(), 3, ONES[:, :2], EITHER, r"\(6, 2\)|tensor b \(2\)"),
    "a dimension less": (nn.BCEWithLogitsLoss(), 1, ONES[:, 0], EITHER, r"\(\[6\]\)|\(6,\)"),
    "a dimension more": (
        nn.CrossEntropyLoss(),
        3,
        ONES[:, :1].long(),
        EITHER,
        r"\(6, 1\)|1D target",
    ),
}


@pytest.mark.parametrize("own", [False, True], ids=["KFAC.closure", "own closure"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_do_not_fit(name, own):
    """What each loss wants is tested in tests/objective."""
    loss, outputs, y, error, message = TARGETS[name]
    optimizer = KFAC(mlp([4, 5, outputs]), loss)
    before = Snapshot.of(optimizer)
    x = normal(M, 4)
    with pytest.raises(error, match=message):
        optimizer.step(closure_of(optimizer, loss, x, y) if own else optimizer.closure(x, y))
    before.assert_untouched(optimizer)


def test_as_many_targets_as_inputs():
    optimizer = trained()
    with pytest.raises(TargetError, match="5 targets for 6 inputs"):
        optimizer.closure(normal(M, 4), normal(5, 3))
    with pytest.raises(ValueError, match=r"chunk.*got 0"):
        optimizer.closure(normal(M, 4), normal(M, 3), chunk=0)


# --------------------------------------------------------------------------------------- closures


def of_another_model(optimizer: KFAC) -> Tensor:
    value = functional.mse_loss(mlp([4, 5, 3])(normal(M, 4)), normal(M, 3))
    value.backward()
    return value


def without_backward(optimizer: KFAC) -> Tensor:
    optimizer.zero_grad()
    return functional.mse_loss(optimizer.model(normal(M, 4)), normal(M, 3))


def with_the_last_steps_gradients(optimizer: KFAC) -> Tensor:
    return functional.mse_loss(optimizer.model(normal(M, 4)), normal(M, 3))


def returning(value: Any) -> Callable[[KFAC], Any]:
    def after_a_pass(optimizer: KFAC) -> Any:
        optimizer.closure(normal(M, 4), normal(M, 3))()
        return value

    return after_a_pass


CLOSURES: list[tuple[Callable[[KFAC], Any], str]] = [
    (lambda optimizer: torch.tensor(1.0), r"never called the model \(Sequential\)"),
    (of_another_model, "never called the model"),
    (torch.no_grad()(without_backward), "with gradients enabled"),
    (without_backward, "no gradient in '0'"),
    (with_the_last_steps_gradients, "no gradient in '0'"),
    *((returning(value), "loss") for value in (None, "1.0", torch.ones(M), torch.ones(0))),
]


@pytest.mark.parametrize(("closure", "message"), CLOSURES)
def test_a_closure_that_is_none(closure, message):
    optimizer = trained()
    before = Snapshot.of(optimizer)
    with pytest.raises(ClosureError, match=message):
        optimizer.step(lambda: closure(optimizer))
    before.assert_untouched(optimizer)


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_the_empirical_fisher_needs_the_targets():
    optimizer = trained(fisher="empirical")
    before = Snapshot.of(optimizer)
    with pytest.raises(ClosureError, match="empirical Fisher needs the training targets"):
        optimizer.step(closure_of(optimizer, mean_square, normal(M, 4), normal(M, 3)))
    before.assert_untouched(optimizer)


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inverse": "block_pentadiagonal"}, "inverse.*block_tridiagonal.*'block_pentadiagonal'"),
        ({"inverse": 3}, "inverse.*got 3"),
        ({"inverse": SampledFisher()}, "inverse.*SampledFisher"),
        ({"fisher": "true"}, "fisher.*sampled.*'true'"),
        ({"fisher": BlockDiagonalInverse}, "fisher.*BlockDiagonalInverse"),
        ({"weight_decay": -1e-5}, "weight_decay.*-1e-05"),
        ({"weight_decay": float("nan")}, "weight_decay.*nan"),
        ({"weight_decay": float("inf")}, "weight_decay.*inf"),
        (
            {"gamma": GammaSearch(), "intervals": Intervals(inverse_interval=15)},
            "multiple.*20 and 15",
        ),
        (
            {"gamma": GammaSearch(10), "intervals": Intervals(inverse_interval=4)},
            "T₂.*T₃.*10 and 4",
        ),
        ({"intervals": 5}, "intervals is an Intervals, such as.*got 5"),
        ({"damping": 1e-3}, "damping is a rule, such as .*Damping"),
        ({"damping": FixedDamping}, "damping is a rule, such as .*Damping"),
        ({"gamma": FixedDamping}, "gamma is a rule, such as .*Gamma"),
        ({"step_rule": 1e-3}, "step_rule is a rule, such as .*RawStep"),
        (
            {"damping": FixedDamping(0.1, reject=2.0)},
            "reject of a rule for λ is an Acceptance.*got 2.0",
        ),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings, message):
    model = mlp([4, 5, 3])
    with pytest.raises(ValueError, match=message):
        KFAC(model, nn.MSELoss(), **settings)
    assert_no_hooks(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Intervals(statistics_fraction=0.0),
            r"statistics_fraction lies in \(0, 1\]; got 0",
        ),
        (lambda: Intervals(statistics_fraction=1.5), "statistics_fraction.*1.5"),
        (lambda: Intervals(fisher_fraction=-0.1), "fisher_fraction.*-0.1"),
        (lambda: Intervals(fisher_fraction=float("nan")), "fisher_fraction.*nan"),
        (lambda: Intervals(inverse_interval=0), "inverse_interval.*got 0"),
        (lambda: Intervals(inverse_lag=-1), "inverse_lag lies between 0 and 10.*Got -1"),
        (lambda: Intervals(inverse_lag=11), "inverse_lag lies between 0 and 10.*Got 11"),
        (lambda: Intervals(inverse_interval=4, inverse_lag=4), "between 0 and 3.*Got 4"),
        (
            lambda: Blocks(unsupported="adam"),
            "unsupported to be 'diagonal' or 'refuse'; got 'adam'",
        ),
        (
            lambda: KFAC(mlp([4, 3]), nn.MSELoss(), blocks=512),
            "blocks is a kronfac.Blocks.* got 512",
        ),
        (
            lambda: trained().closure(normal(M, 4).numpy(), normal(M, 3)),
            "takes tensors; got a numpy.ndarray",
        ),
        (
            lambda: kronfac.AdaptiveBatchSampler(M, torch.optim.SGD(mlp([4, 3]).parameters())),
            "goes by what a KFAC reports.*got a SGD",
        ),
    ],
)
def test_values_that_make_no_sense(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
