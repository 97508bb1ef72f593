"""What is recorded of a closure, and that it can be done again."""

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.errors import ClosureError
from kronfac.objective import Gaussian, objective_of
from kronfac.record import Batch, record
from tests.conftest import ALGEBRA, mlp, normal


@pytest.fixture
def model():
    return mlp([3, 4, 2])


X, Y = normal(6, 3), normal(6, 2, seed=1)


def recorded(model, loss, closure) -> Batch:
    """The mini-batch of a closure, which returns its loss, or has called backward itself."""
    with record(model, objective_of(loss)) as recording:
        returned = closure()
        if returned is not None:
            returned.backward()
    return recording.batch()


def assert_loss(batch: Batch, model, expected) -> None:
    """The loss was seen, and can be computed again from what was recorded."""
    assert_close(batch.recorded_loss, expected.detach().double(), **ALGEBRA)
    with torch.no_grad():
        again = [
            loss.evaluate(z)
            for part in batch.passes
            for loss, z in zip(part.losses, part.run(model), strict=True)
        ]
    assert_close(torch.stack(again).sum(), expected.detach().double(), **ALGEBRA)


def test_one_call(model):
    loss = nn.MSELoss()
    batch = recorded(model, loss, lambda: loss(model(X), Y))
    (part,) = batch.passes
    (call,), (terms,) = part.calls, part.terms
    assert call.args[0] is X
    assert part.examples == 6
    assert (terms.count, terms.event, terms.shape) == (6, 2, (6, 2))
    assert torch.equal(terms.targets, Y)
    assert_loss(batch, model, loss(model(X), Y))


LOSS = nn.MSELoss()
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])


def evaluates(model):
    with torch.no_grad():
        LOSS(model(normal(9, 3)), normal(9, 2))
    return LOSS(model(X), Y)


def calls_in_vain(model):
    LOSS(model(normal(4, 3, seed=7)), Y[:4])
    return LOSS(model(X), Y)


def fails_first(model):
    with pytest.raises(RuntimeError):
        model(normal(6, 7))
    return LOSS(model(X), Y)


CLOSURES = {
    "by keyword": (lambda m: LOSS(target=Y, input=m(X)), Y),
    "a likelihood by keyword": (lambda m: Gaussian()(targets=Y, outputs=m(X)), Y),
    "class indices": (lambda m: nn.CrossEntropyLoss()(m(X), CLASSES), CLASSES),
    "one output, squeezed": (lambda m: LOSS(m(X)[:, :1].squeeze(1), Y[:, 0]), Y[:, :1]),
    "evaluations without gradients": (evaluates, Y),
    "a loss that is not differentiated": (calls_in_vain, Y),
    "a call that fails": (fails_first, Y),
    "twice the outputs": (lambda m: LOSS(2 * m(X), Y), Y),
    "some outputs": (lambda m: LOSS(m(X)[:3], Y[:3]), Y[:3]),
    "outputs and nothing": (lambda m: LOSS(m(X) + 0, Y), Y),
    "a copy": (lambda m: LOSS(m(X).clone(), Y), Y),
    "transposed twice": (lambda m: LOSS(m(X).mT.contiguous().mT, Y), Y),
    "outputs twice": (lambda m: LOSS(torch.cat([m(X), m(X) * 3]).relu()[1:7], Y), Y),
    "transposed": (lambda m: LOSS(m(X).mT, Y.mT), Y.mT),
    "transposed to the same shape": (lambda m: LOSS(m(X[:2]).mT, Y[:2].mT), Y[:2].mT),
}


@pytest.mark.parametrize(("closure", "targets"), CLOSURES.values(), ids=CLOSURES)
def test_a_closure_is_recorded_and_done_again(model, closure, targets):
    """Its targets are those of the loss, which follows the parameters."""
    batch = recorded(model, LOSS, lambda: closure(model))
    (part,) = batch.passes
    assert torch.equal(part.terms[0].targets, targets)
    assert_loss(batch, model, closure(model))
    other = mlp([3, 4, 2], seed=5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        p.data.copy_(q)
    with torch.no_grad():
        again = part.losses[0].evaluate(part.run(model)[0])
    assert_close(again, closure(model).detach().double(), **ALGEBRA)


def test_memory_that_is_used_again_is_not_taken_for_the_outputs():
    """What the outputs lay in is free once they are transformed; the next result may lie there."""
    model, x, y = mlp([4, 3, 2]), normal(64, 4), torch.zeros(64, 2, dtype=torch.float64)
    loss = nn.MSELoss()
    for _ in range(50):
        batch = recorded(model, loss, lambda: loss(model(x) * 2.0 + 1.0, y))
        assert_loss(batch, model, loss(model(x) * 2.0 + 1.0, y))


# ------------------------------------------------------------------------------------ what a loss counts


@pytest.mark.parametrize(
    "weigh", [lambda h: 10 * h, lambda h: h / 7, lambda h: -h + 3 * h, lambda h: h + 5]
)
def test_the_scale_of_a_loss_is_what_arrives_at_it(model, weigh):
    loss = nn.MSELoss()
    plain = recorded(model, loss, lambda: loss(model(X), Y))
    batch = recorded(model, loss, lambda: weigh(loss(model(X), Y)))
    one = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(weigh(one), one)
    assert batch.total_weight == pytest.approx(float(slope) * plain.total_weight, rel=1e-12)
    assert_loss(batch, model, float(slope) * loss(model(X), Y))


def test_without_a_loss_the_modules_curvature_is_that_of_the_outputs(model):
    batch = recorded(model, nn.MSELoss(), lambda: model(X).sum())
    assert batch.examples == 6
    (terms,) = batch.passes[0].terms
    assert terms.targets is None
    assert terms.scale == pytest.approx(1 / 12)
    assert batch.recorded_loss is None


def test_a_loss_that_the_model_returns_first_is_no_prediction():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp([3, 2])

        def forward(self, x):
            z = self.net(x)
            return {"loss": z.abs().mean(), "predictions": z}  # a loss that nobody sees

    model = WithLoss()
    batch = recorded(model, nn.MSELoss(), lambda: model(X)["loss"])
    (terms,) = batch.passes[0].terms
    assert (terms.count, terms.event) == (6, 2)
    (z,) = batch.passes[0].run(model)
    assert_close(z, model.net(X), **ALGEBRA)


def test_without_a_loss_micro_batches_share_the_mean(model):
    def closure():
        for part in (slice(0, 4), slice(4, 6)):
            model(X[part]).sum().backward()

    batch = recorded(model, nn.MSELoss(), closure)
    assert [part.examples for part in batch.passes] == [4, 2]
    assert batch.total_weight == pytest.approx(1 / 2, rel=1e-12)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("which", ["inputs", "targets"])
def test_tensors_that_are_written_to_afterwards_are_refused(model, which):
    loss, x, y = nn.MSELoss(), X.clone(), Y.clone()

    def closure():
        loss(model(x), y).backward()
        (x if which == "inputs" else y).add_(1)

    with pytest.raises(ClosureError, match="changed inputs or targets in place"):
        recorded(model, loss, closure)


# ------------------------------------------------------------------------------------ leaving no trace


def test_another_thread_is_not_recorded_and_notices_nothing(model):
    loss, found = nn.MSELoss(), []

    def evaluate():
        z = model(normal(4, 3, seed=8))
        found.append(loss(z, Y[:4]))

    def closure():
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        return loss(model(X), Y)

    batch = recorded(model, loss, closure)
    assert [part.examples for part in batch.passes] == [6]
    assert_loss(batch, model, loss(model(X), Y))
    assert torch.equal(found[0], loss(model(normal(4, 3, seed=8)), Y[:4]))


def test_neither_the_mini_batch_nor_a_graph_is_kept_alive(model):
    loss, inputs, outputs = nn.MSELoss(), [normal(6, 3)], []
    x = weakref.ref(inputs[0])

    def closure():
        z = model(inputs[0])
        outputs.append(weakref.ref(z))
        return loss(2 * z, Y)

    batch = recorded(model, loss, closure)
    gc.collect()
    assert outputs[0]() is None
    assert not batch.recorded_loss.requires_grad
    assert x() is batch.passes[0].calls[0].args[0]
    inputs.clear()
    del batch
    gc.collect()
    assert x() is None
