"""What else happens to a model that is sharded in worlds of several ranks, and plain in a world of one."""

import io
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.network.sharded import full, is_sharded
from kronfac.report import EventKind
from tests.distributed.cases import EXACT, flat, perceptron, regression, shard
from tests.distributed.ranks import Case

EXAMPLES = 24


class Training:
    """A rank's part of a training run."""

    def __init__(self, rank: int, size: int, **settings: Any) -> None:
        self._own = slice(rank * EXAMPLES // size, (rank + 1) * EXAMPLES // size)
        self._size = size
        self.loss = nn.MSELoss()
        self.model = self.make()
        self.optimizer = KFAC(self.model, self.loss, **EXACT, **settings)

    def make(self, values: list[Tensor] | None = None) -> nn.Module:
        model = perceptron().double()
        for p, value in zip(model.parameters(), values or [], strict=bool(values)):
            p.data.copy_(value)
        return shard(model) if self._size > 1 else model

    def batch(self, k: int) -> tuple[Tensor, Tensor]:
        x, y = regression(k, EXAMPLES)
        return x[self._own], y[self._own]

    def loop(self, first: int, end: int) -> None:
        for k in range(first, end):
            x, y = self.batch(k)
            self.optimizer.zero_grad()
            self.loss(self.model(x), y).backward()
            self.optimizer.step()

    def found(self, **flags: bool) -> Mapping[str, Any]:
        return {"parameters": flat(self.model), "flags": flags}


def saved(rank: int, size: int) -> Mapping[str, Any]:
    """A run that goes on from a file equals the one that wrote it."""
    run = Training(rank, size)
    run.loop(0, 4)
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    values = [full(p.detach()).clone() for p in run.model.parameters()]
    run.loop(4, 8)
    expected = flat(run.model)
    run.model = run.make(values)
    run.optimizer = KFAC(run.model, run.loss, **EXACT)
    file.seek(0)
    run.optimizer.load_state_dict(torch.load(file, weights_only=True))
    buffers = [entry["momentum_buffer"] for entry in run.optimizer.state.values()]
    run.loop(4, 8)
    return run.found(
        goes_on=torch.equal(flat(run.model), expected),
        sharded=size == 1 or all(map(is_sharded, run.model.parameters())),
        whole=not any(map(is_sharded, buffers)) and any(bool(b.any()) for b in buffers),
    )


def rejected(rank: int, size: int) -> Mapping[str, Any]:
    """Steps that are too long are rolled back, and the loss elsewhere is asked of the closure."""
    run = Training(rank, size, lr=8.0)
    kinds: list[EventKind] = []
    for k in range(8):
        x, y = run.batch(k)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss = (run.model(x) - y).square().mean()  # which K-FAC can't see
            loss.backward()
            return loss

        with pytest.warns() if k == 0 else nullcontext():
            run.optimizer.step(closure)
        assert run.optimizer.report is not None
        kinds += [event.kind for event in run.optimizer.report.events]
    return run.found(rejected=EventKind.REJECTED in kinds, unseen=EventKind.LOSS_NOT_SEEN in kinds)


def failed(rank: int, size: int) -> Mapping[str, Any]:
    """An exception after parameters were moved leaves them as they were."""
    run = Training(rank, size)
    run.loop(0, 3)
    before = flat(run.model)
    patch = pytest.MonkeyPatch()

    def fail(state: object) -> None:
        raise ZeroDivisionError

    patch.setattr(run.optimizer, "_become", fail)
    with pytest.raises(ZeroDivisionError):
        run.loop(3, 4)
    patch.undo()
    put_back = torch.equal(flat(run.model), before)
    run.loop(3, 6)
    return run.found(put_back=put_back)


def grouped(rank: int, size: int) -> Mapping[str, Any]:
    """Groups with options of their own, evaluations and a plan in between."""
    run = Training(rank, size)
    parameters = list(run.model.parameters())
    weights = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 1e-3}
    biases = {"params": [p for p in parameters if p.dim() == 1], "lr": 0.5}
    run.optimizer.close()
    run.optimizer = KFAC(run.model, run.loss, params=[weights, biases], **EXACT)
    plans = []
    for k in range(6):
        plans.append("in 3 units" in str(run.optimizer.plan(*run.batch(k))))
        run.loop(k, k + 1)
        run.model.eval()
        with torch.no_grad():
            run.model(run.batch(k)[0])  # FSDP has whole parameters after this
        run.model.train()
    return run.found(planned=all(plans))


def late(rank: int, size: int) -> Mapping[str, Any]:
    """An optimizer that gets its model when that is called."""
    run = Training(rank, size)
    run.optimizer.close()
    run.optimizer = KFAC.for_parameters(run.model.parameters(), run.loss, lr=1.0, **EXACT)
    run.loop(0, 5)
    return run.found()


def clipped(rank: int, size: int) -> Mapping[str, Any]:
    """Gradients that are clipped after the backward pass."""
    run = Training(rank, size)
    for k in range(4):
        x, y = run.batch(k)
        run.optimizer.zero_grad()
        run.loss(run.model(x), y).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()
    return run.found()


def scaled(rank: int, size: int) -> Mapping[str, Any]:
    """Gradients that a GradScaler has scaled."""
    run = Training(rank, size)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for k in range(4):
        x, y = run.batch(k)
        run.optimizer.zero_grad()
        scaler.scale(run.loss(run.model(x), y)).backward()
        scaler.step(run.optimizer)
        scaler.update()
    return run.found()


def averaged(rank: int, size: int) -> Mapping[str, Any]:
    """The average of the iterates in the model, and its own parameters again."""
    run = Training(rank, size, average_decay=0.9)
    run.loop(0, 4)
    iterate = flat(run.model)
    run.optimizer.eval()
    average = flat(run.model)
    run.optimizer.train()
    back = torch.equal(flat(run.model), iterate)
    run.loop(4, 6)
    run.optimizer.eval()
    return run.found(moves=not torch.equal(average, iterate), comes_back=back)


SHARDED: dict[str, Case] = {
    "sharded-saved": saved,
    "sharded-rejected": rejected,
    "sharded-failed": failed,
    "sharded-grouped": grouped,
    "sharded-late": late,
    "sharded-clipped": clipped,
    "sharded-scaled": scaled,
    "sharded-averaged": averaged,
}
