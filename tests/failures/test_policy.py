"""What is done about each cause, and the event that says so: docs/failures.md, line by line."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, EventKind, Intervals
from kronfac.curvature import DampedInverse
from kronfac.curvature.block_diagonal import PreparedBlocks
from kronfac.curvature.block_tridiagonal import PreparedChains
from kronfac.curvature.diagonal import DiagonalOperator
from kronfac.linalg import spd
from kronfac.storage import tensors_in
from tests.conftest import mlp, normal
from tests.failures.steps import FIXED, flat
from tests.optimizer.runs import Snapshot, closure_of, same

X, Y = normal(40, 4), normal(40, 2, seed=1)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
INVERSES = ["block_diagonal", "block_tridiagonal", "ekfac"]


def new(model: nn.Module | None = None, **settings) -> KFAC:
    given = {**FIXED, "intervals": Intervals(1.0, 1.0, 1), **settings}
    return KFAC(mlp([4, 5, 5, 2]) if model is None else model, nn.MSELoss(), **given)


def step(optimizer: KFAC, x: Tensor = X, y: Tensor = Y) -> list[str]:
    """The kinds of the events of one step."""
    optimizer.step(optimizer.closure(x, y))
    assert all(bool(p.isfinite().all()) for p in optimizer.model.parameters())
    return [str(event.kind) for event in optimizer.report.events]


def test_the_page_has_every_kind_and_no_other():
    text = PAGE.read_text()
    named = {kind for kind in map(str, EventKind) if f"`{kind}`" in text}
    assert named == {str(kind) for kind in EventKind}


def test_every_event_is_logged(caplog):
    optimizer = new()
    with caplog.at_level(logging.INFO, logger="kronfac"):
        assert step(optimizer, X, Y * math.nan) == ["nonfinite_loss", "refused"]
    levels = [(r.name, r.levelname) for r in caplog.records]
    assert levels == [("kronfac", "INFO")] * 2  # the first one has warned
    assert "iteration 1: nonfinite_loss: The loss is nan." in caplog.text


# ----------------------------------------------------------------------------- decompositions that fail


def spoil(optimizer: KFAC, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace G of the second layer, after two steps: `change` makes it of A and G."""
    assert step(optimizer) == step(optimizer) == []
    curvature = optimizer._state.curvature
    blocks = list(curvature.blocks)
    blocks[1] = replace(blocks[1], G=change(blocks[1].A, blocks[1].G.clone()))
    optimizer._state = replace(optimizer._state, curvature=replace(curvature, blocks=tuple(blocks)))


def assert_names_the_second_layer(optimizer: KFAC) -> None:
    (event,) = optimizer.report.events
    assert "'2' (" in event.message
    assert all(f"'{name}' (" not in event.message for name in (0, 4, 6))


@pytest.mark.parametrize("inverse", INVERSES[:2])
def test_more_damping_for_the_block_that_needs_it(inverse):
    def barely_indefinite(A: Tensor, G: Tensor) -> Tensor:
        shift = kronfac.extend.FactoredTikhonov().shifts(A, G, FIXED["gamma"].gamma)[1]
        G[0, 0], G[1, 1] = -30 * shift, G[1, 1] + 60 * shift  # with a positive trace
        return G

    optimizer = new(inverse=inverse)
    spoil(optimizer, barely_indefinite)
    assert step(optimizer) == ["block_damped"]
    assert_names_the_second_layer(optimizer)
    dense = optimizer._state.current.inverse.of_unit(1).to_dense()
    assert float(torch.linalg.eigvalsh(dense)[0]) > 0


@pytest.mark.parametrize("inverse", INVERSES[:2])
def test_the_old_inverse_of_a_block_that_has_none_while_the_others_are_refreshed(inverse):
    optimizer = new(mlp([4, 5, 5, 5, 2]), inverse=inverse)
    spoil(optimizer, lambda A, G: G - 1e6 * torch.eye(5))
    old, before = optimizer._state.current.inverse, flat(optimizer.model)
    assert step(optimizer) == ["block_failed"]
    assert_names_the_second_layer(optimizer)
    assert not torch.equal(flat(optimizer.model), before)
    state = optimizer._state
    assert state.current.iteration == state.iteration == 3
    assert state.current.inverse.of_unit(1) is old.of_unit(1)
    # Of the others what there is without it.
    curvature = state.curvature
    rest = replace(curvature, blocks=curvature.blocks[2:], links=curvature.links[2:])
    fresh = optimizer.settings.inverse.prepare(rest).damped(FIXED["gamma"].gamma)
    found = replace(fresh, pieces=state.current.inverse.pieces[-len(fresh.pieces) :])
    vectors = [normal(*unit.shape, seed=n) for n, unit in enumerate(optimizer.network.units)][2:]
    assert same(list(found.mv(vectors)), list(fresh.mv(vectors)))


def failing(monkeypatch, size: int) -> None:
    """No decomposition of matrices of this size succeeds."""

    def info(A: Tensor, *, out=None, **options):
        L, code = torch.ops.aten.linalg_cholesky_ex(A, **options)
        code = code.fill_(1) if A.shape[-1] == size else code
        if out is None:
            return L, code
        out[1].copy_(code)
        return out[0].copy_(L), out[1]

    original = torch.linalg.eigh

    def eigh(A: Tensor, *given, **options):
        if A.shape[-1] == size:
            raise torch.linalg.LinAlgError("as told")
        return original(A, *given, **options)

    monkeypatch.setattr(spd.torch.linalg, "cholesky_ex", info)
    monkeypatch.setattr(spd.torch.linalg, "eigh", eigh)


@pytest.mark.parametrize("inverse", INVERSES)
def test_then_the_plain_gradient(inverse, monkeypatch):
    with monkeypatch.context() as patched:
        failing(patched, 2)  # G of the last layer
        optimizer = new(inverse=inverse)
        before = flat(optimizer.model)
        assert step(optimizer) == ["block_plain"]
        assert "'4' (" in optimizer.report.events[0].message
    piece = optimizer._state.current.inverse.of_unit(2)
    assert isinstance(piece, DiagonalOperator)
    assert not torch.equal(before, flat(optimizer.model))
    # With the length that the mean curvature gives, and along the gradient.
    block = optimizer._state.curvature.blocks[2]
    truth = 1 / (block.dense().trace() / block.size + FIXED["gamma"].gamma ** 2)
    torch.testing.assert_close(piece.D, truth.expand_as(piece.D))
    # A run that is continued from there is the same to the bit, and mends itself.
    other = new(inverse=inverse)
    other.model.load_state_dict(optimizer.model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert step(optimizer) == step(other) == []
    assert same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("inverse", INVERSES)
def test_an_inverse_that_is_garbage_without_an_error(inverse, monkeypatch):
    """LAPACK says that all is well, and the result is not finite."""
    for garbage in (math.inf, math.nan):
        with monkeypatch.context() as patched:
            for kind in (PreparedBlocks, PreparedChains):

                def damped(self: Any, gamma: float, original: Any = kind.damped) -> DampedInverse:
                    made = original(self, gamma)
                    for tensor in tensors_in(made):
                        tensor.fill_(garbage)  # noqa: B023
                    return made

                patched.setattr(kind, "damped", damped)
            optimizer = new(inverse=inverse)
            assert step(optimizer) == ["block_plain"]


# ---------------------------------------------------------------------------------------- out of memory

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


def without_memory(monkeypatch, inverse: type, error: Exception) -> None:
    def prepare(self, curvature):
        raise error

    monkeypatch.setattr(inverse, "prepare", prepare)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("lag", [0, 2])
def test_no_memory_for_a_refresh(error, lag, monkeypatch):
    first, optimizer = (
        new(intervals=Intervals(1.0, 1.0, 4, lag)),
        new(intervals=Intervals(1.0, 1.0, 4)),
    )
    with monkeypatch.context() as patched:
        without_memory(patched, kronfac.extend.BlockDiagonalInverse, error)
        assert step(first) == ["out_of_memory", "block_plain"]
    assert step(first) == []
    for _ in range(8):
        step(optimizer)
    old = optimizer._state.current
    with monkeypatch.context() as patched:
        without_memory(patched, kronfac.extend.BlockDiagonalInverse, error)
        kinds = [step(optimizer) for _ in range(4)]
    assert ["out_of_memory", "refresh_failed"] in kinds
    assert optimizer._state.current is old


def test_other_errors_of_a_refresh_are_raised_and_change_nothing(monkeypatch):
    optimizer = new()
    step(optimizer)
    before = Snapshot.of(optimizer)
    without_memory(monkeypatch, kronfac.extend.BlockDiagonalInverse, RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        step(optimizer)
    before.assert_untouched(optimizer)


# ------------------------------------------------------------------------------- told when they begin


class Skipping(nn.Module):
    """A layer that calls may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = mlp([4, 4])[0], mlp([4, 2])[0]
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        return self.top(x if self.skips else torch.tanh(self.bottom(x)))


@pytest.mark.filterwarnings("ignore:The closure left no gradient")
def test_a_layer_that_saw_no_data():
    optimizer = new(Skipping())
    closure = closure_of(optimizer, nn.MSELoss(), X, Y)
    optimizer.step(closure)
    assert not optimizer.report.events
    moments = optimizer._state.curvature.blocks[0]
    optimizer.model.skips = True
    for _ in range(2):
        optimizer.step(closure)
        assert not optimizer.report.events
    assert same(vars(optimizer._state.curvature.blocks[0]), vars(moments))


def test_dead_units_and_constant_inputs():
    model = mlp([4, 5, 2], "relu")
    with torch.no_grad():
        model[0].bias[:2] = -1e3
    x = X.clone()
    x[:, 1] = 0.3
    optimizer = new(model)
    assert [step(optimizer, x) for _ in range(2)] == [[], []]


def test_a_batch_of_one():
    optimizer = new()
    step(optimizer)
    kinds = [step(optimizer, X[:1], Y[:1]), step(optimizer, X[1:2], Y[1:2]), step(optimizer)]
    assert kinds == [[], [], []]


def test_a_rollback_does_not_undo_what_others_did():
    """The rejected step is subtracted from the parameters as somebody has changed them since."""
    optimizer = KFAC(mlp([4, 5, 2]), nn.MSELoss(), lr=50.0)
    before = flat(optimizer.model)
    optimizer.step(optimizer.closure(X, Y))
    with torch.no_grad():
        for p in optimizer.model.parameters():
            p.add_(1e-3)
    optimizer.zero_grad()
    optimizer.objective.module(optimizer.model(X), Y).backward()
    optimizer.step()
    assert optimizer.report.rejected
    torch.testing.assert_close(flat(optimizer.model), before + 1e-3, rtol=0, atol=1e-12)
