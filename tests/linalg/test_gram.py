"""xᵀx by strips against the whole product."""

import pytest
import torch
from torch.testing import assert_close

from kronfac.linalg.kronecker import STRIP, add_gram
from tests.conftest import ALGEBRA, normal

SIZES = [1, 5, STRIP, 2 * STRIP - 1, 2 * STRIP + 1, 3 * STRIP + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("decay", [None, 1.0, 0.9])
def test_strips_are_the_whole_product(size, decay):
    x, other = normal(4, size), normal(3, size, seed=1)
    total = None if decay is None else other.mT @ other
    expected = 0.3 * x.mT @ x + (0 if decay is None else decay * total)
    result = add_gram(total, x, decay or 0.0, 0.3)
    assert_close(result, expected, **ALGEBRA)


def test_many_columns_give_an_exactly_symmetric_matrix_and_leave_the_old_one_alone():
    x = normal(5, 3 * STRIP)
    old = torch.eye(3 * STRIP, dtype=torch.float64)
    result = add_gram(old, x, 0.5, 1.0)
    assert_close(result, result.mT, rtol=0, atol=0)
    assert_close(old, torch.eye(3 * STRIP, dtype=torch.float64), rtol=0, atol=0)


def test_no_vectors():
    assert_close(add_gram(None, normal(0, 2 * STRIP), 0.0, 1.0).abs().sum(), normal(0).sum())
