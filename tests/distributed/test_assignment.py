"""Work divided between processes by cost."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kronfac.distributed.world import assign


def loads(costs, assignment, ranks):
    """The load of every rank."""
    found = [0] * ranks
    for cost, rank in zip(costs, assignment, strict=True):
        found[rank] += cost
    return found


COSTS = st.lists(st.integers(0, 1000), max_size=7)


def test_the_largest_goes_first_to_the_least_loaded():
    # 7 → 0, 6 → 1, 5 → 2, 4 → 2 (5 + 4), 3 → 1 (6 + 3), 2 → 0 (7 + 2).
    assert assign([2, 3, 4, 5, 6, 7], 3) == [0, 1, 2, 2, 1, 0]
    assert loads([2, 3, 4, 5, 6, 7], (0, 1, 2, 2, 1, 0), 3) == [9, 9, 9]


def test_ties_go_to_the_earlier_piece_and_the_lower_rank():
    assert assign([1, 1, 1], 2) == [0, 1, 0]


def test_a_rank_may_have_nothing():
    assert assign([5], 3) == [0]
    assert assign([], 3) == []


@given(COSTS, st.integers(1, 3))
def test_the_largest_load_is_within_grahams_bound_of_the_best(costs, ranks):
    largest = max(loads(costs, assign(costs, ranks), ranks))
    best = min(
        max(loads(costs, tried, ranks)) for tried in product(range(ranks), repeat=len(costs))
    )
    assert 3 * ranks * largest <= (4 * ranks - 1) * best


@given(COSTS, st.integers(1, 8))
def test_all_the_work_is_done(costs, ranks):
    found = assign(costs, ranks)
    assert all(0 <= rank < ranks for rank in found)
    assert sum(loads(costs, found, ranks)) == sum(costs)
