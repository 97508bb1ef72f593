"""Which forward passes are seen: those that are trained on, as they are, and no others."""

import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import InputFactors

ALL_ROWS = InputFactors(interval=1, rows=None)


class Network(nn.Module):
    """Dropout, BatchNorm, attention and a recurrent layer, perhaps in a checkpoint."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.cell, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def block(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        z: Tensor = self.drop(self.cell(x)[0])
        return z

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh().mT).mT
        if self.checkpointed is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.checkpointed)
        z: Tensor = self.head(x)
        return z


def train(model: nn.Module, optimizer: torch.optim.Optimizer, between: object = None) -> Tensor:
    """Four steps; the parameters and A's afterwards."""
    torch.manual_seed(5)
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.randn(7, 5, 6).to(next(model.parameters()).dtype)
        functional.mse_loss(model(x), x[..., :3]).backward()
        if callable(between):
            between()
        optimizer.step()
    factors = [s["A"].flatten() for s in optimizer.state.values() if "A" in s]
    return torch.cat([*factors, *(p.detach().flatten() for p in model.parameters())])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_is_seen_once(reentrant):
    results = []
    for checkpointed in (None, reentrant):
        model = Network(checkpointed).double()
        optimizer = WhitenedMomentum(model, method="polar", inputs=ALL_ROWS)
        results.append(train(model, optimizer))
    torch.testing.assert_close(*results)


def test_a_pass_computes_the_same_whether_it_is_seen_or_not():
    results = []
    for make in (lambda m: None, WhitenedMomentum):
        model = Network()
        optimizer = make(model)
        torch.manual_seed(1)
        loss = model(torch.randn(7, 5, 6)).square().sum()
        loss.backward()
        grads = [p.grad.flatten() for p in model.parameters()]
        results.append(torch.cat([loss.detach().view(1), *grads, torch.rand(1)]))
        del optimizer
    assert torch.equal(*results)


def test_evaluations_and_other_threads_are_not_seen():
    results = []
    for disturbed in (False, True):
        model = Network()
        optimizer = WhitenedMomentum(model, method="polar", inputs=ALL_ROWS)
        disturb = None
        if disturbed:
            state = torch.get_rng_state

            def disturb(model: nn.Module = model, state=state) -> None:
                before, training = state(), model.training
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 5, 6))
                with torch.inference_mode():
                    model(torch.randn(4, 5, 6))
                for p in model.parameters():
                    p.requires_grad_(False)
                model(torch.randn(4, 5, 6))
                for p in model.parameters():
                    p.requires_grad_(True)
                thread = threading.Thread(
                    target=lambda: torch.no_grad()(model)(torch.randn(4, 5, 6))
                )
                thread.start()
                thread.join()
                model.train(training)
                torch.set_rng_state(before)

        results.append(train(model, optimizer, disturb))
    assert torch.equal(*results)


def test_there_are_no_hooks_between_samples_and_none_on_copies():
    model = Network()
    optimizer = WhitenedMomentum(model)
    assert model._forward_hooks
    hooked = []
    x = torch.randn(2, 5, 6)
    for _ in range(41):
        model(x).sum().backward()
        hooked.append(bool(model._forward_hooks or model.head._forward_pre_hooks))
        optimizer.step()
    assert [k for k, seen in enumerate(hooked) if seen] == [0, 1, 2, 4, 8, 16, 20, 40]


def test_a_forward_pass_that_fails_leaves_no_mode():
    model = Network()
    optimizer = WhitenedMomentum(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 7))
    assert not torch.overrides._get_current_function_mode_stack()
    train(model, optimizer)


def test_parts_of_a_model_that_are_called_by_themselves_are_seen():
    encoder = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(8, 2)})
    optimizer = WhitenedMomentum(model)
    model["head"](model["encoder"](torch.randn(100, 6)).relu()).sum().backward()
    optimizer.step()
    assert optimizer.report.methods["polar"] == ["encoder.0.weight"]


@pytest.mark.slow
def test_a_compiled_model_has_the_factors_of_its_own_code():
    results = []
    for compiled in ("nothing", "all of it", "a part", "a part in place"):
        model = Network().double()
        model.drop.p, model.attention.dropout = 0.0, 0.0
        called = torch.compile(model, backend="eager") if compiled == "all of it" else model
        if compiled == "a part":
            model.attention = torch.compile(model.attention, backend="eager")
        if compiled == "a part in place":
            model.attention.compile(backend="eager")
        optimizer = WhitenedMomentum(called, method="polar", inputs=ALL_ROWS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            results.append(train(called, optimizer))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


def test_a_model_that_is_never_seen_is_warned_of():
    model = nn.Linear(4, 4)
    optimizer = WhitenedMomentum(model)
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.warns(UserWarning, match="has seen no product"):
        optimizer.step()
    assert optimizer.report.methods == {"adam": ["weight"]}
