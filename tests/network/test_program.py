"""Passes that can be run again: with other parameters, and on some of the examples."""

import pytest
import torch
from torch import nn

from kronfac.model import Network
from kronfac.objective import Categorical
from kronfac.record import Batch, LossCall, ModelCall, Pass, record, sizes, subsets
from kronfac.record.examples import check_examples
from tests.conftest import batch, mlp, network_of, normal, seeded


def first(network: Network, whole: Batch, fraction: float) -> Batch:
    whole = check_examples(network, whole)
    (found,) = subsets(network, whole, sizes(whole.examples, fraction), None)
    return found


def inputs_of(part: Batch) -> list[torch.Tensor]:
    return [call.args[0] for one in part.passes for call in one.calls]


@pytest.mark.parametrize(
    ("fraction", "rows"),
    [(1.0, [4, 4, 2]), (0.5, [4, 1]), (0.4, [4]), (0.41, [4, 1]), (0.05, [1]), (1 / 8, [2])],
)
def test_the_first_examples_in_the_passes_in_which_they_came(fraction, rows):
    x, y = normal(10, 3), torch.arange(10) % 2
    network = network_of(mlp([3, 2]), Categorical())
    part = first(network, batch(network, x, y, chunk=4), fraction)
    assert [one.examples for one in part.passes] == rows
    assert torch.equal(torch.cat(inputs_of(part)), x[: sum(rows)])
    (terms,) = zip(*(one.terms for one in part.passes), strict=True)
    assert torch.equal(torch.cat([t.targets for t in terms]), y[: sum(rows)])
    assert [t.shape for t in terms] == [(n, 2) for n in rows]
    assert part.examples == sum(rows)


def test_fractions_are_rounded_up_but_for_rounding_error():
    network = network_of(mlp([3, 2]))
    whole = batch(network, normal(100, 3))
    assert sizes(whole.examples, 0.07, 0.0701, 0.001, 1.0) == [7, 8, 1, 100]


def test_drawn_subsets_lie_in_each_other_and_are_in_the_order_of_the_examples():
    x = torch.arange(40, dtype=torch.float64).reshape(20, 2)
    network = network_of(mlp([2, 2]))
    whole = batch(network, x, chunk=6)
    small, large = subsets(network, whole, [5, 11], seeded(3))
    rows = [torch.cat(inputs_of(part))[:, 0].tolist() for part in (small, large)]
    assert [len(found) for found in rows] == [5, 11]
    assert set(rows[0]) < set(rows[1])
    assert all(found == sorted(found) for found in rows)
    assert rows[0] != [2.0 * i for i in range(5)]
    again, _ = subsets(network, whole, [5, 11], seeded(3))
    assert torch.cat(inputs_of(again))[:, 0].tolist() == rows[0]


def test_every_example_is_drawn_equally_often():
    """400 draws of 5 of 20: 100 times each, give or take five standard deviations of 8.7."""
    network = network_of(mlp([1, 1]))
    whole = batch(network, torch.arange(20, dtype=torch.float64).reshape(20, 1), chunk=7)
    counts, generator = torch.zeros(20), seeded(1)
    for _ in range(400):
        (part,) = subsets(network, whole, [5], generator)
        counts[torch.cat(inputs_of(part))[:, 0].long()] += 1
    assert (counts - 100).abs().max() < 5 * 8.7


def test_views_not_copies():
    x = normal(6, 3)
    network = network_of(mlp([3, 2]))
    (found,) = inputs_of(first(network, batch(network, x), 0.5))
    assert found.data_ptr() == x.data_ptr()


# ------------------------------------------------------------------- which arguments have examples


class Masked(nn.Module):
    """A mask that has the examples, a table that has not and is as long, a number and a name."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x, extra, *, scale, name):
        assert name == "n"
        return self.linear(x * extra["mask"][:, None]) * scale


class Table(nn.Module):
    """A table of six rows beside six examples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()

    def forward(self, x, table):
        return self.linear(x) + table.sum(dim=0)


def one_pass(network, *args, **kwargs) -> Pass:
    terms = network.objective.declare(network.model(*args, **kwargs).shape)
    return Pass((ModelCall(args, kwargs, outputs=(0,)),), (LossCall(0, terms),))


def test_examples_are_taken_of_every_tensor_that_has_them():
    x, mask, scale = normal(6, 3), normal(6, seed=1), torch.tensor(2.0)
    network = network_of(Masked())
    part = one_pass(network, x, {"mask": mask}, scale=scale, name="n")
    (call,) = first(network, Batch((part,)), 1 / 3).passes[0].calls
    assert torch.equal(call.args[0], x[:2])
    assert torch.equal(call.args[1]["mask"], mask[:2])
    assert call.kwargs["scale"] is scale
    assert call.kwargs["name"] == "n"


def test_with_a_table_that_happens_to_be_as_long_the_pass_is_used_whole():
    x, table = normal(6, 3), normal(6, 2, seed=1)
    network = network_of(Table())
    part = one_pass(network, x, table)
    (some,) = first(network, Batch((part,)), 1 / 3).passes
    assert not some.apart
    assert some.calls == part.calls


class OwnLoss(nn.Module):
    """Squared errors inside the model, and outputs that depend on the other examples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1).double()

    def forward(self, x, y):
        z = self.linear(x - x.mean(dim=0)).squeeze()
        return nn.functional.mse_loss(z, y), z


def test_the_check_warns_of_nothing():
    model = OwnLoss()
    network = network_of(model)
    with record(model, network.objective) as recording:
        model(normal(6, 3), normal(6, seed=1))[0].backward()
    (part,) = recording.batch().passes
    assert not check_examples(network, Batch((part,))).passes[0].apart


def test_a_batch_counts_its_terms_and_their_weight():
    network = network_of(mlp([3, 4]), nn.MSELoss())
    whole = batch(network, normal(10, 3), normal(10, 4, seed=1), chunk=4)
    assert whole.examples == 10
    assert [part.terms[0].event for part in whole.passes] == [4, 4, 4]
    # A mean over four outputs each: F_R of a term counts a quarter.
    assert whole.total_weight == pytest.approx(1 / 4, rel=1e-12)
    assert not whole.summed
    assert whole.scaled(3.0).total_weight == pytest.approx(3 / 4, rel=1e-12)
    summed = network_of(mlp([3, 4]), nn.MSELoss(reduction="sum"))
    whole = batch(summed, normal(10, 3), normal(10, 4, seed=1), chunk=4)
    assert whole.summed
    assert whole.total_weight == 10
