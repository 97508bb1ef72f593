"""Typical mistakes: each gets a message that says who, the rule, what it got, and the remedy.

One test for each that no other file tests; docs/howto/when_something_goes_wrong.md lists them all, with the
tests of the others.
"""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import kronfac
from kronfac import KFAC
from kronfac.errors import (
    ClosureError,
    LoopError,
    StateError,
    TargetError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from tests.loop import loops
from tests.loop.loops import step_with_closure, step_without_closure

X = torch.linspace(-2, 2, 64 * 4).reshape(64, 4).sin()
Y = torch.arange(64) % 3
LOSS = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


both = pytest.mark.parametrize("train", [step_without_closure, step_with_closure])


def told(error: type[Exception], *parts: str) -> Any:
    """The error with all these parts in its message, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(parts))


# --------------------------------------------------------------------------------- construction


@pytest.mark.parametrize("settings", [{}, {"lr": 1e-3}], ids=str)
def test_the_parameters_instead_of_the_model(settings):
    for given in (network().parameters(), list(network().parameters())):
        with told(TypeError, "KFAC needs the model itself", r"KFAC\(model, loss\); got a"):
            KFAC(given, **settings)


def test_no_loss():
    with told(TypeError, "KFAC needs the loss too", "got none", r"KFAC\(model, nn\.Cross"):
        KFAC(network(), lr=1e-3)


@pytest.mark.parametrize("loss", [functional.cross_entropy, functional.mse_loss])
def test_a_function_as_the_loss(loss):
    with told(UnsupportedLossError, "KFAC needs a loss module", loss.__name__, r"Give it nn\.\w+"):
        KFAC(network(), loss)


def test_a_class_as_the_loss():
    with told(UnsupportedLossError, "KFAC needs a loss module", "CrossEntropyLoss", "Make one"):
        KFAC(network(), nn.CrossEntropyLoss)


def test_a_learning_rate_as_the_loss():
    with told(UnsupportedLossError, "KFAC needs a loss", "the float 0.001", "Use MSELoss"):
        KFAC(network(), 1e-3)


def test_a_loss_that_is_not_reduced():
    with told(UnsupportedLossError, "KFAC needs", "got 'none'", r"Give it CrossEntropyLoss\(\)"):
        KFAC(network(), nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision(dtype):
    with told(UnsupportedModelError, "KFAC needs", str(dtype), r"float32.*torch\.autocast"):
        KFAC(network().to(dtype), LOSS)


def test_data_parallel_over_several_devices():
    parallel = nn.DataParallel(network())
    parallel.device_ids = [0, 1]
    with told(UnsupportedModelError, "KFAC trains.*one device", "2 devices", r"model\.module"):
        KFAC(parallel, LOSS)


# --------------------------------------------------------------------------------- the loop


class OwnLoss(nn.Module):
    """As users write them, with a loss of torch's inside."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(z, y) + 0.01 * z.square().mean()


@pytest.mark.parametrize(
    "other",
    [functional.cross_entropy, nn.CrossEntropyLoss(), OwnLoss()],
    ids=["function", "of one class", "of the user's"],
)
def test_another_loss_in_the_loop_names_the_line_to_change(other):
    model = network()
    optimizer = KFAC(model, LOSS)
    before = [p.detach().clone() for p in model.parameters()]
    with told(
        LoopError,
        "KFAC.step.. needs the loss that backward.. was called on",
        "calls of the CrossEntropyLoss object that KFAC was given, and it was not called",
        "Call the same object, not a function or another CrossEntropyLoss",
        r"pass a closure.*optimizer\.step\(closure\)",
    ):
        step_without_closure(optimizer, lambda: other(model(X), Y))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))
    assert optimizer.report is not None
    assert optimizer.report.iteration == 1


def test_outputs_that_cannot_be_traced_back_are_named():
    model = network()
    optimizer = KFAC(model, LOSS)
    with told(
        LoopError, "called with something that KFAC cannot trace back to the model's outputs"
    ):
        step_without_closure(optimizer, lambda: LOSS(model(X).cumsum(1), Y))


@pytest.mark.parametrize(
    "cut", [lambda z: z.detach().requires_grad_(), lambda z: z.data.requires_grad_()]
)
def test_detached_outputs_are_named(cut):
    """backward() was called, and did not reach the model."""
    model = network()
    optimizer = KFAC(model, LOSS)
    with told(
        LoopError,
        "the CrossEntropyLoss was called with a tensor that is detached from the outputs of the model",
        r"Call the loss with what the model returns: \.detach\(\)",
    ):
        step_without_closure(optimizer, lambda: LOSS(cut(model(X)), Y))


@both
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss()], ids=str)
def test_targets_that_would_be_broadcast_are_an_error_and_no_warning_of_a_line_of_ours(train, loss):
    model = nn.Linear(4, 1)
    optimizer = KFAC(model, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = ("KFAC reads this loss", r"shape \(64, 1\); got \(64,\)", "Reshape", "view_as")
        with told(TargetError, *parts):
            train(optimizer, lambda: loss(model(X), X[:, 0]))
    assert not torch.overrides._get_current_function_mode_stack()
    train(optimizer, lambda: loss(model(X), X[:, :1]))


def coefficient_of_outputs(model, c):
    return nn.functional.mse_loss(c * model(X), X[:, :3])


def coefficient_of_targets(model, c):
    return nn.functional.mse_loss(model(X), c.exp() * X[:, :3])


def coefficient_of_residual(model, c):
    return kronfac.least_squares(model(X) - c * X[:, :3])


@pytest.mark.parametrize(
    "objective", [coefficient_of_outputs, coefficient_of_targets, coefficient_of_residual]
)
def test_an_unknown_coefficient_outside_the_model_is_told_of_once(objective):
    model, c = network(), torch.ones(1, requires_grad=True)
    optimizer = KFAC(model, nn.MSELoss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step_with_closure(optimizer, lambda: objective(model, c))
    (message,) = [str(w.message) for w in caught if "outside the model" in str(w.message)]
    assert "of shapes (1,): KFAC trains the model's parameters and not these" in message
    assert "Register them as nn.Parameter of the model" in message
    assert [w.filename for w in caught if "outside the model" in str(w.message)] == [loops.__file__]


@pytest.mark.parametrize("split", [False, True])
def test_inputs_that_derivatives_are_taken_by_are_no_coefficients(split):
    model, x = network(), X.clone().requires_grad_()
    optimizer = KFAC(model, nn.MSELoss())

    def objective() -> Tensor:
        columns = torch.cat(list(x.split(1, dim=1)), dim=1) if split else x
        return nn.functional.mse_loss(model(columns) * x[:, :3], X[:, :3])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            step_with_closure(optimizer, objective)


def test_a_declaration_in_the_loop_is_no_loss():
    model = network()
    optimizer = KFAC(model, kronfac.Gaussian())

    def loss() -> Tensor:
        z = kronfac.observe(model(X), kronfac.Categorical(), scale=1 / len(X))
        return -z.log_softmax(1)[torch.arange(len(X)), Y].mean()

    with told(LoopError, "kronfac.observe declares the curvature of a loss, but not its value"):
        step_without_closure(optimizer, loss)


def test_a_functional_loss_in_a_closure_is_seen():
    ends = []
    for loss in (LOSS, functional.cross_entropy):
        model = network()
        optimizer = KFAC(model, LOSS)
        for _ in range(3):
            step_with_closure(optimizer, lambda m=model, f=loss: f(m(X), Y))  # type: ignore[misc]
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


UNSEEN = (
    r"KFAC\.step\(\) has not seen a loss in the closure.*the MSELoss that KFAC was given.*"
    r"\(r\*\*2\)\.mean\(\).*kronfac\.least_squares\(r\).*kronfac\.GaussNewton.*kronfac\.observe.*"
    r"torch\.autograd\.grad.*kronfac\.physics\.WithDerivatives"
)


def test_a_loss_by_hand_in_a_closure():
    model, targets = network(), torch.zeros(64, 3)
    optimizer = KFAC(model, nn.MSELoss())

    def loss() -> Tensor:
        return ((model(X) - targets) ** 2).mean()

    with pytest.warns(UserWarning, match=UNSEEN):
        step_with_closure(optimizer, loss)
    step_with_closure(optimizer, loss)  # said once: a second warning would be an error
    assert optimizer.report is not None
    assert "loss_not_seen" in {event.kind for event in optimizer.report.events}


def test_a_residual_with_derivatives_by_autograd_in_a_closure():
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    points = torch.linspace(0, 1, 40).reshape(20, 2).requires_grad_()

    def loss() -> Tensor:
        u = model(points)
        (slope,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        return kronfac.least_squares(slope - u)

    with pytest.warns(UserWarning, match=UNSEEN):
        step_with_closure(KFAC(model, nn.MSELoss()), loss)


def squared(r: Tensor) -> Tensor:
    return kronfac.least_squares(r)


def with_a_module(r: Tensor) -> Tensor:
    value: Tensor = nn.MSELoss()(r, torch.zeros_like(r))
    return value


def declared(r: Tensor) -> Tensor:
    r = kronfac.observe(r, kronfac.Gaussian(variance=0.5), scale=1 / r.numel())
    return (r**2).mean()


def convex(r: Tensor) -> Tensor:
    loss = kronfac.GaussNewton(nn.MSELoss())
    value: Tensor = loss(r, torch.zeros_like(r))
    return value


@pytest.mark.parametrize("loss", [squared, with_a_module, declared, convex])
def test_every_remedy_for_a_loss_by_hand_is_one(loss):
    """A warning would be an error; the steps are those of the loss module."""
    ends = []
    for own in (with_a_module, loss):
        model = network()
        optimizer = KFAC(model, nn.MSELoss(), fisher="exact")
        for _ in range(2):
            step_with_closure(optimizer, lambda m=model, f=own: f(m(X) - 1))  # type: ignore[misc]
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_a_second_loss_module_that_was_not_given():
    model, other = network(), nn.MSELoss()
    optimizer = KFAC(model, LOSS)

    def loss() -> Tensor:
        z = model(X)
        total: Tensor = LOSS(z, Y) + other(z, torch.zeros(64, 3))
        return total

    with pytest.warns(
        UserWarning,
        match=r"The gradient of '0\.weight'.*another loss.*autograd\.grad.*step\(\) a clos.*WithDeriv",
    ):
        step_without_closure(optimizer, loss)
    model = network()
    step_with_closure(KFAC(model, LOSS), loss)  # which sees both: a warning would be an error


def test_a_warning_points_to_the_line_of_the_step():
    model = network()
    optimizer = KFAC(model, LOSS)
    (LOSS(model(X), Y) + 1e-2 * model[0].weight.square().sum()).backward()
    with pytest.warns(UserWarning, match="another loss") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


@both
def test_a_loss_that_is_multiplied_is_that_loss(train):
    """No mistake: the same steps."""
    ends = []
    for factor in (1.0, 10.0):
        model = network().double()
        optimizer = KFAC(model, LOSS)
        for _ in range(3):
            train(optimizer, lambda m=model, f=factor: f * LOSS(m(X.double()), Y))
        ends.append([p.detach() for p in model.parameters()])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)


@both
def test_an_empty_mini_batch(train):
    model = network()
    optimizer = KFAC(model, LOSS)
    with told(TargetError, "KFAC needs at least one example", r"\(0, 3\)", "Leave out"):
        train(optimizer, lambda: LOSS(model(X[:0]), Y[:0]))
    with told(ValueError, "needs at least one example; got none", "Leave out"):
        optimizer.closure(X[:0], Y[:0])


@both
def test_a_loss_that_is_nan_is_told_once_and_nothing_moves(train):
    model = network()
    optimizer = KFAC(model, LOSS)
    before = [p.detach().clone() for p in model.parameters()]
    message = r"KFAC refused a step at iteration 1: The loss is nan\..*look for NaN"
    with pytest.warns(UserWarning, match=message):
        train(optimizer, lambda: LOSS(model(X * torch.nan), Y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(optimizer, lambda: LOSS(model(X * torch.nan), Y))
    assert optimizer.report is not None
    assert optimizer.report.refused
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_loss_instead_of_a_closure():
    model = network()
    optimizer = KFAC(model, LOSS)
    with told(TypeError, r"KFAC\.step\(\) takes a closure", "got a Tensor", r"loss\.backward\(\)"):
        optimizer.step(LOSS(model(X), Y))  # type: ignore[arg-type]


def test_inference_mode_around_a_step():
    model = network()
    optimizer = KFAC(model, LOSS)
    with torch.inference_mode(), told(LoopError, r"KFAC\.step\(\)", "inference_mode", "outside"):
        optimizer.step(optimizer.closure(X, Y))


class Named(nn.Module):
    """Returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(x)}


@both
def test_a_model_that_returns_a_dict_trains(train):
    model = Named()
    optimizer = KFAC(model, LOSS)
    start = float(LOSS(model(X)["logits"], Y).detach())
    for _ in range(5):
        train(optimizer, lambda: LOSS(model(X)["logits"], Y))
    assert float(LOSS(model(X)["logits"], Y).detach()) < start


def test_a_model_that_returns_a_dict_with_kfacs_own_closure():
    optimizer = KFAC(Named(), LOSS)
    parts = (r"KFAC\.closure", "a tensor; got a dict with the keys", "logits", "Call model, loss")
    with told(UnsupportedModelError, *parts):
        optimizer.step(optimizer.closure(X, Y))


# --------------------------------------------------------------------------------- a changed model


@both
def test_a_layer_that_was_replaced(train):
    model = network()
    optimizer = KFAC(model, LOSS)
    model[2] = nn.Linear(8, 3)
    parts = ("KFAC trains", r"'2\.weight', '2\.bias' no longer belong", "Make a new KFAC")
    with told(UnsupportedModelError, *parts):
        train(optimizer, lambda: LOSS(model(X), Y))


@both
def test_a_layer_that_was_frozen(train):
    model = network()
    optimizer = KFAC(model, LOSS)
    model[0].requires_grad_(False)
    with told(UnsupportedModelError, "'0' has been frozen", "KFAC", "make a new one"):
        train(optimizer, lambda: LOSS(model(X), Y))


@both
def test_another_dtype_after_a_step(train):
    model = network()
    optimizer = KFAC(model, LOSS)
    train(optimizer, lambda: LOSS(model(X), Y))
    saved = copy.deepcopy(optimizer.state_dict())
    model.double()
    parts = ("KFAC's statistics", "torch.float32 on cpu", "moved to torch.float64", "load optim")
    with told(UnsupportedModelError, *parts):
        train(optimizer, lambda: LOSS(model(X.double()), Y))
    optimizer.load_state_dict(saved)  # as the message says
    train(optimizer, lambda: LOSS(model(X.double()), Y))


def test_another_dtype_before_the_first_step_is_no_mistake():
    model = network()
    optimizer = KFAC(model, LOSS)
    model.double()
    step_without_closure(optimizer, lambda: LOSS(model(X.double()), Y))
    model = network()
    optimizer = KFAC(model, LOSS)
    model.bfloat16()
    with told(UnsupportedModelError, "KFAC needs", "torch.bfloat16", "Keep the model in float32"):
        step_without_closure(optimizer, lambda: LOSS(model(X.bfloat16()), Y))


# --------------------------------------------------------------------------------- states


def test_the_state_of_another_optimizer():
    model = network()
    adam = torch.optim.Adam(model.parameters())
    LOSS(model(X), Y).backward()
    adam.step()
    parts = ("not the state_dict of a KFAC", "got 'param_groups', 'state'", "Load what KFAC")
    for foreign in (adam.state_dict(), model.state_dict(), [1]):
        with told(StateError, *(parts if "state" in foreign else parts[::2])):
            KFAC(model, LOSS).load_state_dict(foreign)  # type: ignore[arg-type]


def test_the_state_for_another_model():
    model = network()
    optimizer = KFAC(model, LOSS)
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))
    wider = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    with told(StateError, r"shape \(8, 5\); it must be \(9, 5\)", "Load it into the model that"):
        KFAC(wider, LOSS).load_state_dict(optimizer.state_dict())


def test_an_unpickled_optimizer_has_a_model_of_its_own():
    model = network()
    optimizer = KFAC(model, LOSS)
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))
    copied = pickle.loads(pickle.dumps(optimizer))
    with told(LoopError, "has not been called", r"\(a copy if the optimizer was copied"):
        step_without_closure(copied, lambda: LOSS(model(X), Y))
    step_without_closure(
        copied, lambda: copied.objective.module(copied.model(X), Y)
    )  # as the message says
    assert isinstance(LoopError("as for a closure"), ClosureError)
