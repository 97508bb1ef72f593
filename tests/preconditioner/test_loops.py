"""The preconditioner in loops of other optimizers: torch's, schedules, scalers, what is left behind."""

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kronfac
from kronfac import Preconditioner
from kronfac.errors import LoopError, StateError


def data(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs whose scales are far apart, and a target that depends on the small ones too."""
    torch.manual_seed(0)
    x = torch.randn(256, 6, dtype=dtype) * torch.logspace(0.5, -1.5, 6, dtype=dtype)
    scaled = x / torch.logspace(0.5, -1.5, 6, dtype=dtype)
    return x, torch.tanh(scaled[:, :3]).prod(1, keepdim=True) + scaled[:, 3:].sum(1, keepdim=True)


def perceptron() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train(
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int = 30,
    preconditioned: bool = True,
    **settings: object,
) -> float:
    """The loss after some steps."""
    (x, y), loss_fn = data(), nn.MSELoss()
    optimizer = make(list(model.parameters()))
    preconditioner = Preconditioner(model, loss_fn, **settings) if preconditioned else None  # type: ignore[arg-type]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        if preconditioner is not None:
            preconditioner.step()
        optimizer.step()
    with torch.no_grad():
        return float(loss_fn(model(x), y))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"inverse": "ekfac"},
        {"factor_interval": 5, "inverse_interval": 10},
        {"fisher": "empirical"},
    ],
    ids=["sampled", "ekfac", "intervals", "empirical"],
)
def test_sgd_with_it_is_ahead_of_the_best_of_sgd(settings):
    """After the same number of steps, of SGD's learning rates the best."""
    rates = (0.03, 0.1, 0.3)
    plain = [
        train(perceptron(), lambda p, lr=lr: torch.optim.SGD(p, lr=lr), preconditioned=False)
        for lr in rates
    ]
    found = train(perceptron(), lambda p: torch.optim.SGD(p, lr=0.03), **settings)
    assert found < 0.2 * min(plain)


def test_in_front_of_adamw():
    """Ahead of AdamW with the same learning rate, the best of three for AdamW alone."""
    rates = (0.03, 0.1, 0.3)
    plain = [
        train(perceptron(), lambda p, lr=lr: torch.optim.AdamW(p, lr=lr), preconditioned=False)
        for lr in rates
    ]
    assert min(plain) == plain[1]
    found = train(perceptron(), lambda p: torch.optim.AdamW(p, lr=0.1), damping=1.0)
    assert found < 0.8 * min(plain)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
def test_in_front_of_muon():
    """Ahead of Muon alone. It takes matrices: the biases keep their gradients, and SGD trains them."""
    losses = []
    for preconditioned in (False, True):
        (x, y), loss_fn, model = data(), nn.MSELoss(), perceptron()
        matrices = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        muon, sgd = torch.optim.Muon(matrices, lr=0.2), torch.optim.SGD(biases, lr=0.05)
        preconditioner = Preconditioner(model, loss_fn, params=matrices, damping=0.1)
        for _ in range(30):
            model.zero_grad()
            loss_fn(model(x), y).backward()
            kept = [p.grad.clone() for p in biases]
            if preconditioned:
                preconditioner.step()
            assert all(torch.equal(p.grad, g) for p, g in zip(biases, kept, strict=True))
            muon.step()
            sgd.step()
        losses.append(float(loss_fn(model(x), y).detach()))
    assert losses[1] < 0.7 * losses[0]


def test_a_schedule_that_the_bound_on_the_step_follows():
    (x, y), loss_fn, model = data(), nn.MSELoss(), perceptron()
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 40)
    seen: list[float] = []

    def rate(step: int) -> float:
        seen.append(sgd.param_groups[0]["lr"])
        return seen[-1]

    preconditioner = Preconditioner(
        model, loss_fn, damping=lambda step: 0.1 * 0.9**step + 1e-3, kl_clip=1e-2, lr=rate
    )
    start = float(loss_fn(model(x), y).detach())
    for _ in range(40):
        sgd.zero_grad()
        loss_fn(model(x), y).backward()
        preconditioner.step()
        sgd.step()
        schedule.step()
    assert seen == sorted(seen, reverse=True)
    assert len(seen) == 40
    assert float(loss_fn(model(x), y).detach()) < 0.3 * start


def convolutional() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def test_batch_norm():
    """Its running averages see the loop's passes alone; its gradient has its block."""
    torch.manual_seed(3)
    x, y = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
    loss_fn, model = nn.CrossEntropyLoss(), convolutional()
    other = copy.deepcopy(model)
    preconditioner = Preconditioner(model, loss_fn, damping=1e-2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    start = float(loss_fn(model(x), y).detach())
    other(x)
    for step in range(15):
        sgd.zero_grad()
        loss_fn(model(x), y).backward()
        norm = [p.grad.clone() for p in model[1].parameters()]
        preconditioner.step()
        if step == 0:
            other(x)
            for a, b in zip(model.buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(a, b)
        same = [torch.equal(p.grad, g) for p, g in zip(model[1].parameters(), norm, strict=True)]
        assert not any(same)
        sgd.step()
    assert float(loss_fn(model(x), y).detach()) < 0.3 * start


def test_an_embedding_and_attention():
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Embedding(9, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Linear(8, 9),
    )
    x = torch.randint(9, (16, 5))
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(model, loss_fn, damping=1e-1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(10):
        sgd.zero_grad()
        loss = loss_fn(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        preconditioner.step()
        sgd.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_a_functional_loss_goes_by_the_likelihood_that_was_given():
    grads = []
    for loss_fn in (nn.CrossEntropyLoss(), kronfac.Categorical()):
        torch.manual_seed(5)
        model = nn.Linear(4, 3).double()
        x, y = torch.randn(20, 4).double(), torch.randint(3, (20,))
        preconditioner = Preconditioner(model, loss_fn, fisher="exact")
        call = loss_fn if isinstance(loss_fn, nn.CrossEntropyLoss) else F.cross_entropy
        call(model(x), y).backward()
        preconditioner.step()
        grads.append(model.weight.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-8, atol=1e-10)


def test_a_grad_scaler():
    """Gradients are unscaled before; the curvature is that of the loss as it was."""
    grads = []
    for scale in (1.0, 1024.0):
        (x, y), loss_fn, model = data(torch.float64), nn.MSELoss(), perceptron().double()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        preconditioner = Preconditioner(model, loss_fn, grad_scaler=scaler)
        scaler.scale(loss_fn(model(x), y)).backward()
        scaler.unscale_(sgd)
        preconditioner.step()
        grads.append([p.grad.clone() for p in model.parameters()])
        scaler.step(sgd)
        scaler.update()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-10)


def test_a_gradient_that_is_not_finite_stays_as_it_is():
    (x, y), loss_fn, model = data(), nn.MSELoss(), perceptron()
    preconditioner = Preconditioner(model, loss_fn)
    loss_fn(model(x), y * torch.inf).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="A gradient is not finite"):
        preconditioner.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, old, equal_nan=True)
    assert preconditioner.steps == 0


@pytest.mark.parametrize("make", [perceptron, convolutional])
def test_a_saved_state_continues_to_the_bit(make, tmp_path):
    torch.manual_seed(6)
    x = torch.randn(64, 6) if make is perceptron else torch.randn(64, 1, 6, 6)
    outputs = make()(x[:2]).shape[1]
    y, loss_fn = torch.randn(64, outputs), nn.MSELoss()

    def one(preconditioner: Preconditioner) -> list[Tensor]:
        model = preconditioner.model
        model.zero_grad()
        loss_fn(model(x), y).backward()
        preconditioner.step()
        return [p.grad.clone() for p in model.parameters()]

    settings = {"factor_interval": 2, "inverse_interval": 3}
    first = Preconditioner(make(), loss_fn, **settings)
    for _ in range(4):
        one(first)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = Preconditioner(make(), loss_fn, **settings)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.steps == 4
    for _ in range(4):
        for a, b in zip(one(first), one(second), strict=True):
            assert torch.equal(a, b)


class Sometimes(nn.Module):
    """A matrix of its own that is used if the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.mix = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        z: Tensor = self.last(h @ self.mix if x[0, 0] > 0 else h)
        return z


@pytest.mark.parametrize("positive", [True, False])
def test_a_state_has_what_the_first_pass_has_shown(positive):
    """Resumed on a mini-batch that shows something else."""
    x, loss_fn = torch.randn(32, 5, generator=torch.Generator().manual_seed(0)), nn.MSELoss()
    signs = [1.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    x[:, 0] = x[:, 0].abs() if positive else -x[:, 0].abs()

    def one(preconditioner: Preconditioner, k: int) -> list[Tensor | None]:
        model = preconditioner.model
        model.zero_grad()
        loss_fn(model(x * signs[k]), x[:, :3]).backward()
        preconditioner.step()
        return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]

    for saved_at in range(1, len(signs)):
        first, second = (Preconditioner(Sometimes(), loss_fn) for _ in range(2))
        for k in range(saved_at):
            one(first, k)
        second.load_state_dict(first.state_dict())
        for k in range(saved_at, len(signs)):
            for a, b in zip(one(first, k), one(second, k), strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


def test_states_that_do_not_fit():
    model, loss_fn = perceptron(), nn.MSELoss()
    preconditioner = Preconditioner(model, loss_fn)
    with pytest.raises(StateError, match=r"takes what Preconditioner\.state_dict returned"):
        preconditioner.load_state_dict({"state": {}, "param_groups": []})


def test_mistakes():
    (x, y), loss_fn, model = data(), nn.MSELoss(), perceptron()
    with pytest.raises(TypeError, match="needs the model itself"):
        Preconditioner(model.parameters(), loss_fn)  # type: ignore[arg-type]
    for name, message in (
        ("momentum", "optimizer that comes after"),
        ("sides", "WhitenedMomentum"),
    ):
        with pytest.raises(TypeError, match=f"Preconditioner has no argument '{name}'.*{message}"):
            Preconditioner(model, loss_fn, **{name: 0.9})
    for settings, message in (
        ({"damping": 0.0}, "damping is a positive number"),
        ({"kl_clip": 1e-3}, "give lr too"),
        ({"factor_interval": 0}, "factor_interval is an integer from 1 on"),
    ):
        with pytest.raises(ValueError, match=message):
            Preconditioner(model, loss_fn, **settings)
    preconditioner = Preconditioner(model, loss_fn)
    with pytest.raises(LoopError, match="no parameter has one"):
        preconditioner.step()
    loss_fn(model(x), y).backward()
    preconditioner.step()
    loss_fn(model(x), y).backward()
    with pytest.warns(UserWarning, match="preconditioned again"):
        preconditioner.step()
    preconditioner.close()
    model.zero_grad()
    loss_fn(model(x), y).backward()
    with pytest.raises(
        LoopError, match=r"Preconditioner\.step\(\) found gradients, but it has not seen"
    ):
        preconditioner.step()


def test_validation_in_between_and_nothing_is_left():
    (x, y), loss_fn, model = data(), nn.MSELoss(), perceptron()
    preconditioner = Preconditioner(model, loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model.zero_grad()
            loss_fn(model(x), y).backward()
            preconditioner.step()
            with torch.no_grad():
                loss_fn(model(x[:5]), y[:5])
            loss_fn(model(x[:5]), y[:5])
    del preconditioner
    gc.collect()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), loss_fn))
