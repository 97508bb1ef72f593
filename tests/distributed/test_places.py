"""Where a rank's examples of S₁ stand among those of all ranks, known without a message."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from kronfac.curvature.estimate import head_counts
from kronfac.curvature_update import find_place
from kronfac.distributed import Ranks, Spread
from kronfac.network import Batch, Network, subsets, terms_of_examples
from tests.conftest import batch, network_of, normal, seeded

LENGTHS = (4, 2, 5)
"""Places of an example, by rank: each rank pads its own sequences."""
EXAMPLES = (5, 1, 7)


class Silent(Ranks):
    """A rank of several that may not say anything."""

    size = len(EXAMPLES)

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def gather(self, phase: object, numbers: object) -> list[list[float]]:
        raise AssertionError("a message")


def places(network: Network, rank: int) -> Batch:
    """Examples with several places, each of which has a term, in two passes."""
    x: Tensor = normal(EXAMPLES[rank], 3, LENGTHS[rank])
    y = torch.zeros(EXAMPLES[rank], LENGTHS[rank], dtype=torch.long)
    return batch(network, x, y, chunk=4)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("counts", [(3, 6), (1, 2), (13, 13)])
def test_places_follow_from_the_numbers_of_the_examples(
    drawn: bool, counts: tuple[int, int]
) -> None:
    network = network_of(nn.Conv1d(3, 2, 1).double(), nn.CrossEntropyLoss())
    wholes = [places(network, rank) for rank in range(len(EXAMPLES))]
    starts = (0, *accumulate(EXAMPLES))
    terms = [terms_of_examples(network, whole) for whole in wholes]
    assert terms == [[length] for length in LENGTHS]
    found, own = [], []
    for rank, whole in enumerate(wholes):
        spread = Spread(
            Silent(rank),
            start=starts[rank],
            starts=starts,
            terms=terms,
            examples_elsewhere=starts[-1] - EXAMPLES[rank],
        )
        S1, S2 = subsets(network, whole, counts, seeded(3) if drawn else None, spread)
        found.append(find_place(spread, S1, S2))
        own.append((S1, S2))
    for part in (0, 1):  # by counting what the ranks have
        assert {pair[part].by_rank for pair in own} == {tuple(pair[part].examples for pair in own)}
    each = [0 if S1.weightless else sum(head_counts(S1.passes).values()) for S1, _ in own]
    for rank, place in enumerate(found):
        assert place is not None
        assert (place.statistics, place.fisher) == counts
        assert place.heads == [(sum(each), sum(each[:rank]))]


def test_examples_that_differ_in_their_terms_are_not_known_so() -> None:
    network = network_of(nn.Conv1d(3, 2, 1).double(), nn.CrossEntropyLoss())
    long, short = places(network, 0).passes[0], places(network, 1).passes[0]
    assert terms_of_examples(network, Batch((long,))) == [4]
    assert terms_of_examples(network, Batch((long, short))) == []
