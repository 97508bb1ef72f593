import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.errors import ClosureError, TargetError, UnsupportedModelError
from kronfac.objective import Categorical, Gaussian, objective_of
from kronfac.statistics import Recorder
from tests.conftest import ALGEBRA, mlp, normal


@pytest.fixture
def model():
    return mlp([3, 4, 2])


X, Y = normal(6, 3), normal(6, 2, seed=1)


def record(model, loss, closure):
    recorder = Recorder(model, objective_of(loss))
    with recorder.recording():
        closure()
    return recorder.take()


def test_one_call(model):
    loss = nn.MSELoss()
    batch = record(model, loss, lambda: loss(model(X), Y))
    (call,) = batch.calls
    assert call.args[0] is X
    assert (call.rows, call.outputs) == (6, (6, 2))
    assert torch.equal(call.targets, Y)
    assert_close(batch.seen_loss, loss(model(X), Y).detach(), **ALGEBRA)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.MSELoss(reduction="sum"), Gaussian()])
def test_micro_batches_of_different_sizes_make_up_the_whole(model, loss):
    def closure():
        for part in (slice(0, 4), slice(4, 5), slice(5, 6)):
            loss(model(X[part]), Y[part]).backward()

    batch = record(model, loss, closure)
    assert [call.rows for call in batch.calls] == [4, 1, 1]
    assert torch.equal(torch.cat([call.targets for call in batch.calls]), Y)
    assert_close(batch.seen_loss, loss(model(X), Y).detach(), **ALGEBRA)


@pytest.mark.parametrize("loss", [nn.MSELoss(), Gaussian()])
def test_arguments_by_keyword(model, loss):
    def closure():
        if isinstance(loss, Gaussian):
            return loss(targets=Y, outputs=model(X))
        return loss(target=Y, input=model(X))

    assert torch.equal(record(model, loss, closure).calls[0].targets, Y)


def test_class_indices_and_flattened_outputs(model):
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    loss = nn.CrossEntropyLoss()
    assert torch.equal(record(model, loss, lambda: loss(model(X), y)).calls[0].targets, y)

    single, loss = mlp([3, 4, 1]), nn.MSELoss()
    batch = record(single, loss, lambda: loss(single(X).squeeze(1), Y[:, 0]))
    assert torch.equal(batch.calls[0].targets, Y[:, :1])
    assert batch.seen_loss is not None


def test_evaluations_without_gradients_are_not_recorded(model):
    loss = nn.MSELoss()

    def closure():
        with torch.no_grad():
            loss(model(normal(9, 3)), normal(9, 2))
        loss(model(X), Y)

    batch = record(model, loss, closure)
    assert [call.rows for call in batch.calls] == [6]
    assert_close(batch.seen_loss, loss(model(X), Y).detach(), **ALGEBRA)


@pytest.mark.parametrize(
    "changed",
    [
        lambda z: 2 * z,
        lambda z: z[:3],
        lambda z: z + 0,
        lambda z: z.clone(),
    ],
)
def test_a_loss_of_something_else_than_the_outputs_is_not_taken_for_theirs(model, changed):
    loss = nn.MSELoss()

    def closure():
        z = changed(model(X))
        loss(z, Y[: len(z)])

    batch = record(model, loss, closure)
    assert batch.seen_loss is None
    assert batch.calls[0].targets is None


def test_memory_that_is_used_again_is_not_taken_for_the_outputs():
    """What the outputs lay in is free once they are transformed; the next result may lie there."""
    model, x, y = mlp([4, 3, 2]), normal(64, 4), torch.zeros(64, 2, dtype=torch.float64)
    loss = nn.MSELoss()

    def closure():
        loss(model(x) * 2.0 + 1.0, y).backward()

    seen = [record(model, loss, closure).seen_loss for _ in range(50)]
    assert seen == [None] * 50


def test_outputs_that_were_overwritten_are_not_taken_for_the_outputs(model):
    loss = nn.MSELoss()
    assert record(model, loss, lambda: loss(model(X).mul_(2.0), Y)).seen_loss is None


@pytest.mark.parametrize("rows", [6, 2])  # 2 × 2 is the same shape again
def test_transposed_outputs_do_not_mix_up_the_targets(model, rows):
    loss, y = nn.MSELoss(), Y[:rows]
    targets = record(model, loss, lambda: loss(model(X[:rows]).mT, y.mT)).calls[0].targets
    assert targets is None or torch.equal(targets, y)


def test_without_a_loss_there_are_rows_but_no_targets(model):
    batch = record(model, nn.MSELoss(), lambda: model(X).sum().backward())
    assert batch.cases == 6
    assert batch.calls[0].targets is None
    assert batch.seen_loss is None


def test_one_call_of_two_without_its_loss(model):
    loss = nn.MSELoss()

    def closure():
        model(X)
        loss(model(X), Y)

    assert record(model, loss, closure).seen_loss is None


def test_a_second_loss_on_the_same_outputs(model):
    loss = nn.MSELoss()

    def closure():
        z = model(X)
        return loss(z, Y) + loss(z, 2 * Y)

    assert record(model, loss, closure).seen_loss is None


@pytest.mark.parametrize("y", [Y[:, :1], Y[:1], Y[0]])
@pytest.mark.filterwarnings("ignore:Using a target size")  # torch's own word on it
def test_targets_that_torch_would_broadcast_are_refused(model, y):
    loss = nn.MSELoss()
    with pytest.raises(TargetError, match="needs targets of the outputs' shape"):
        record(model, loss, lambda: loss(model(X), y))


@pytest.mark.parametrize("index", [-100, 1])
def test_ignored_targets_are_refused(model, index):
    loss = nn.CrossEntropyLoss(ignore_index=index)
    y = torch.tensor([0, 0, index, 0, 0, 0])
    with pytest.raises(TargetError, match=rf"ignore_index \({index}\)"):
        record(model, loss, lambda: loss(model(X), y))


def test_a_closure_that_never_calls_the_model(model):
    with pytest.raises(ClosureError, match="never called the model"):
        record(model, nn.MSELoss(), lambda: None)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x):
        return self.linear(x), x


class Scalar(Pair):
    def forward(self, x):
        return self.linear(x).sum()


@pytest.mark.parametrize(
    ("model", "what"), [(Pair, "returned a tuple"), (Scalar, r"returned a tensor of shape \(\)")]
)
def test_models_that_do_not_return_one_tensor_of_cases(model, what):
    model = model()
    with pytest.raises(UnsupportedModelError, match=what):
        record(model, nn.MSELoss(), lambda: model(X))
    assert not model._forward_hooks


def test_hooks_are_there_only_while_it_records(model):
    loss = Categorical()
    recorder = Recorder(model, objective_of(loss))
    with recorder.recording():
        assert len(model._forward_hooks) == len(loss._forward_hooks) == 1
    assert not model._forward_hooks
    assert not loss._forward_hooks
    with pytest.raises(ZeroDivisionError), recorder.recording():
        1 / 0  # noqa: B018
    assert not model._forward_hooks


def test_a_recording_starts_afresh_and_is_handed_over_once(model):
    loss = nn.MSELoss()
    recorder = Recorder(model, objective_of(loss))
    for _ in range(2):
        with recorder.recording():
            loss(model(X), Y)
    assert recorder.take().cases == 6
    with pytest.raises(ClosureError):
        recorder.take()


def test_the_mini_batch_is_not_kept_alive(model):
    loss = nn.MSELoss()
    recorder = Recorder(model, objective_of(loss))
    x = normal(6, 3)
    gone = weakref.ref(x)
    with recorder.recording():
        loss(model(x), Y).backward()
    batch = recorder.take()
    assert gone() is batch.calls[0].args[0]
    del batch, x
    gc.collect()
    assert gone() is None
