"""Typical mistakes: each gets a message that says who, the rule, what it got, and the remedy.

docs/howto/when_something_goes_wrong.md lists them all.
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
    TargetError,
    UnsupportedLossError,
    UnsupportedModelError,
)
from tests.failures.steps import flat
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


def over_two_devices():
    parallel = nn.DataParallel(network())
    parallel.device_ids = [0, 1]
    return parallel


LossError = UnsupportedLossError
CONSTRUCTIONS: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "parameters": (
        lambda: KFAC(network().parameters(), lr=1e-3),
        TypeError,
        ("KFAC needs the model itself", r"KFAC\(model, loss\); got a"),
    ),
    "the wrong order": (
        lambda: KFAC(LOSS, network()),
        TypeError,
        ("KFAC takes the model, then the loss", r"KFAC\(model, loss\); got a CrossEntropyLoss"),
    ),
    "no loss": (
        lambda: KFAC(network(), lr=1e-3),
        TypeError,
        ("KFAC needs the loss too", "got none", r"KFAC\(model, nn\.Cross"),
    ),
    "a function": (
        lambda: KFAC(network(), functional.mse_loss),
        LossError,
        ("KFAC needs a loss module", "mse_loss", r"Give it nn\.\w+"),
    ),
    "a class": (
        lambda: KFAC(network(), nn.CrossEntropyLoss),
        LossError,
        ("KFAC needs a loss module", "CrossEntropyLoss", "Make one"),
    ),
    "a learning rate": (
        lambda: KFAC(network(), 1e-3),
        LossError,
        ("KFAC needs a loss", "the float 0.001", "Use MSELoss"),
    ),
    "not reduced": (
        lambda: KFAC(network(), nn.CrossEntropyLoss(reduction="none")),
        LossError,
        ("KFAC needs", "got 'none'", r"Give it CrossEntropyLoss\(\)"),
    ),
    "half precision": (
        lambda: KFAC(network().bfloat16(), LOSS),
        UnsupportedModelError,
        ("KFAC needs", "torch.bfloat16", r"float32.*torch\.autocast"),
    ),
    "several devices": (
        lambda: KFAC(over_two_devices(), LOSS),
        UnsupportedModelError,
        ("kronfac trains.*one device", "2 devices", r"model\.module"),
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTIONS)
def test_a_mistake_in_the_construction(case):
    make, error, parts = CONSTRUCTIONS[case]
    with told(error, *parts):
        make()


# --------------------------------------------------------------------------------- the loop


def forward_without_gradients(optimizer, model):
    with torch.no_grad():
        model(X)
    with torch.inference_mode():
        model(X)


def another_model(optimizer, model):
    LOSS(copy.deepcopy(model)(X), Y).backward()


def changed_inputs(optimizer, model):
    x = X.clone()
    LOSS(model(x), Y).backward()
    x.zero_()


def a_second_step(optimizer, model):
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))


class OwnLoss(nn.Module):
    """As users write them, with a loss of torch's inside."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(z, y) + 0.01 * z.square().mean()


def zeroed(by_model: bool, to_none: bool) -> Any:
    def loop(optimizer, model):
        LOSS(model(X), Y).backward()
        (model if by_model else optimizer).zero_grad(set_to_none=to_none)

    return loop, (r"zero_grad\(\) is called between backward\(\) and step\(\)",)


def another_loss(other: Any) -> Any:
    def loop(optimizer, model):
        other(model(X), Y).backward()

    return loop, (
        "KFAC.step.. needs the loss that backward.. was called on",
        "calls of the CrossEntropyLoss object that KFAC was given.*there was none",
        "Call the same object, not a function or another CrossEntropyLoss",
        r"pass a closure.*optimizer\.step\(closure\)",
    )


def unread(operation: str) -> tuple[str, ...]:
    return (
        "It can't follow how the argument of the CrossEntropyLoss was computed",
        rf"the model \(Sequential\).*it can't read {operation}",
        r"into the model's forward, or pass a closure.*optimizer\.step\(closure\)",
    )


LOOPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no forward": (
        lambda optimizer, model: None,
        ("needs a forward and a backward pass since the last step",),
    ),
    "no gradients": (forward_without_gradients, ("called 0 times, and 2 times without gradients",)),
    "no backward": (
        lambda optimizer, model: LOSS(model(X), Y),
        (r"It was called 1 times.*and loss\.backward\(\) before step\(\)",),
    ),
    "another model": (another_model, (r"the model \(Sequential\)\. It was called 0 times",)),
    "changed inputs": (changed_inputs, ("were changed in place",)),
    "a second step": (
        a_second_step,
        ("has not seen the call of the model", "since the last step", r"step\(\) once after each"),
    ),
    "not followed": (
        lambda optimizer, model: LOSS(model(X).cumsum(1), Y).backward(),
        unread("CumsumBackward0"),
    ),
    "a coefficient": (
        lambda optimizer, model: LOSS(torch.ones((), requires_grad=True) * model(X), Y).backward(),
        unread("MulBackward0"),
    ),
    "a function": another_loss(functional.cross_entropy),
    "another loss of one class": another_loss(nn.CrossEntropyLoss()),
    "a loss of the user's": another_loss(OwnLoss()),
    "zeroed": zeroed(by_model=False, to_none=True),
    "zeroed in place": zeroed(by_model=False, to_none=False),
    "zeroed through the model": zeroed(by_model=True, to_none=True),
    "zeroed through the model in place": zeroed(by_model=True, to_none=False),
    "detached": (
        lambda optimizer, model: LOSS(model(X).detach().requires_grad_(), Y).backward(),
        (
            "the CrossEntropyLoss was called with a tensor that is detached from the outputs",
            r"Call the loss with what the model returns: \.detach\(\)",
        ),
    ),
    "data": (
        lambda optimizer, model: LOSS(model(X).data.requires_grad_(), Y).backward(),
        ("called with a tensor that is detached from the outputs",),
    ),
}


@pytest.mark.parametrize("case", LOOPS)
def test_a_mistake_in_the_loop(case):
    model = network()
    optimizer = KFAC(model, LOSS)
    loop, parts = LOOPS[case]
    loop(optimizer, model)
    before, steps = flat(model), 0 if optimizer.report is None else optimizer.report.iteration
    for _ in range(2):
        with told(LoopError, *parts):
            optimizer.step()
        assert torch.equal(flat(model), before)
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))  # as it should be
    assert optimizer.report is not None
    assert optimizer.report.iteration == steps + 1


def test_gradients_of_zero_are_no_mistake():
    """By themselves; or set by nobody's backward pass, as torch's distributed checkpoints do."""
    model = network()
    optimizer = KFAC(model, LOSS)
    step_without_closure(optimizer, lambda: 0 * LOSS(model(X), Y))
    assert optimizer.report is not None
    assert not optimizer.report.events
    before = flat(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(flat(model), before)


def test_an_exception_in_the_model_leaves_no_mode():
    model = network()
    optimizer = KFAC(model, LOSS)
    with pytest.raises(RuntimeError):
        model(X[:, :3])
    assert not torch.overrides._get_current_function_mode_stack()
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))


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

    with told(
        LoopError, "records calls of the Gaussian object that KFAC was given.*there was none"
    ):
        step_without_closure(optimizer, loss)


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
def test_a_model_that_returns_a_dict(train):
    model = Named()
    optimizer = KFAC(model, LOSS)
    train(optimizer, lambda: LOSS(model(X)["logits"], Y))
    assert optimizer.report.predicted_change < 0
    parts = (r"KFAC\.closure", "a tensor; got a dict with the keys", "logits", "Call model, loss")
    with told(UnsupportedModelError, *parts):
        optimizer.step(optimizer.closure(X, Y))


# --------------------------------------------------------------------------------- a changed model


def replace_a_layer(model):
    model[2] = nn.Linear(8, 3)


CHANGES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "replaced": (
        replace_a_layer,
        ("KFAC trains", r"'2\.weight', '2\.bias' no longer belong", "Make a new KFAC"),
    ),
    "frozen": (
        lambda model: model[0].requires_grad_(False),
        ("'0' has been frozen", "KFAC", "make a new one"),
    ),
    "half precision": (
        lambda model: model.bfloat16(),
        ("KFAC needs", "torch.bfloat16", "Keep the model in float32"),
    ),
}


@both
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed(change, train):
    make, parts = CHANGES[change]
    model = network()
    optimizer = KFAC(model, LOSS)
    make(model)
    with told(UnsupportedModelError, *parts):
        train(optimizer, lambda: LOSS(model(X.to(model[0].weight.dtype)), Y))


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


def test_an_unpickled_optimizer_has_a_model_of_its_own():
    model = network()
    optimizer = KFAC(model, LOSS)
    step_without_closure(optimizer, lambda: LOSS(model(X), Y))
    copied = pickle.loads(pickle.dumps(optimizer))
    with told(LoopError, "It was called 0 times", r"\(a copy if the optimizer was copied"):
        step_without_closure(copied, lambda: LOSS(model(X), Y))
    step_without_closure(
        copied, lambda: copied.objective.module(copied.model(X), Y)
    )  # as the message says
    assert isinstance(LoopError("as for a closure"), ClosureError)
