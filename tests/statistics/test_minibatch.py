import pytest
import torch

from kronfac.minibatch import Batch, Call, as_matrix
from tests.conftest import batch, mlp, normal


@pytest.mark.parametrize(
    ("fraction", "rows"),
    [(1.0, [4, 4, 2]), (0.5, [4, 1]), (0.4, [4]), (0.41, [4, 1]), (0.05, [1]), (1 / 8, [2])],
)
def test_the_first_cases_in_the_chunks_in_which_they_came(fraction, rows):
    x, y = normal(10, 3), torch.arange(10)
    part = batch(x, 2, y, chunk=4).first(fraction)
    assert [call.rows for call in part.calls] == rows
    assert torch.equal(torch.cat([call.args[0] for call in part.calls]), x[: sum(rows)])
    assert torch.equal(torch.cat([call.targets for call in part.calls]), y[: sum(rows)])
    assert [call.outputs for call in part.calls] == [(n, 2) for n in rows]
    assert part.cases == sum(rows)
    assert part.outputs == 2


def test_rows_are_taken_of_every_tensor_that_has_them():
    x, mask, scale = normal(6, 3), normal(6, seed=1), torch.tensor(2.0)
    call = Call((x, {"mask": mask}), {"scale": scale, "name": "n"}, 6, torch.Size((6, 2)))
    first = call.first(2)
    assert torch.equal(first.args[0], x[:2])
    assert torch.equal(first.args[1]["mask"], mask[:2])
    assert first.kwargs["scale"] is scale
    assert first.kwargs["name"] == "n"


def test_views_not_copies():
    x = normal(6, 3)
    assert batch(x, 2).first(0.5).calls[0].args[0].data_ptr() == x.data_ptr()


def test_run_with_other_parameters_leaves_the_model_alone():
    model, other, x = mlp([3, 4, 2]), mlp([3, 4, 2], seed=1), normal(5, 3)
    call = batch(x, 2).calls[0]
    assert torch.equal(call.run(model), model(x))
    assert torch.equal(call.run(model, dict(other.named_parameters())), other(x))
    assert torch.equal(call.run(model), model(x))


def test_outputs_count_what_comes_after_the_rows():
    calls = (Call((), {}, 4, torch.Size((4, 2, 3))), Call((), {}, 1, torch.Size((1, 2, 3))))
    assert Batch(calls).outputs == 6
    assert Batch(calls).cases == 5
    assert as_matrix(normal(4, 2, 3)).shape == (4, 6)
    assert as_matrix(normal(4)).shape == (4, 1)
