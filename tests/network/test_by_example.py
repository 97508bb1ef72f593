"""Which dimension has the examples: guessed by its size, or known."""

import pytest
import torch
from torch.testing import assert_close

from kronfac.network.by_example import Layout, by_example
from tests.conftest import normal


def test_a_known_dimension_is_taken_whatever_the_sizes_are():
    x = normal(4, 4, 3)
    assert_close(by_example(x, 4), x)
    assert_close(by_example(x, 4, dim=1), x.transpose(0, 1))


def test_several_entries_of_an_example_are_places_of_it():
    """As windows of images are, which attention has in place of examples."""
    x = normal(5, 4, 2, 3)  # (length, examples, windows, features)
    found = by_example(x.flatten(1, 2), 4, dim=1)
    assert found.shape == (4, 10, 3)
    for n in range(4):
        assert_close(found[n].sum(dim=0), x[:, n].sum(dim=(0, 1)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_dimension_that_does_not_have_all_examples_counts_as_one(size):
    x = normal(4, size, 3)
    assert by_example(x, 4, dim=1).shape == (1, 4 * size, 3)
    assert not Layout(dim=1).has_examples(x, 4)
    assert Layout().has_examples(x, 4)


def test_rows_that_were_not_used_have_no_gradient():
    g = normal(5, 2)
    grads = Layout(first_row=1).grads(g, 5, 6)
    assert grads.shape == (5, 1, 6)
    assert_close(grads[:, 0, 1:3], g)
    assert not grads[..., [0, 3, 4, 5]].any()


def test_places_that_count_go_with_the_examples():
    counts = torch.tensor([[True, True, False], [True, False, False]])  # (time, examples)
    assert_close(Layout(dim=1, counts=counts).counted(3), counts.mT)
    assert Layout().counted(3) is None
