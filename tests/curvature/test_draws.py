"""Random numbers by the numbers of terms: the same for any division over ranks and chunks, and few."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.curvature.estimate import Sample, estimate
from kronfac.curvature.fisher import BLOCK, Draws, ExactFisher, SampledFisher, child_seed
from kronfac.linearize import linearize
from kronfac.objective import Categorical
from kronfac.storage import tensors_in
from tests.conftest import ALGEBRA, LIKELIHOODS, batch, mlp, network_of, normal, seeded

COUNTS = (1, 7, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 17)


class Counting:
    """Uniform numbers (2, terms, 3), and how many terms they were asked for."""

    def __init__(self) -> None:
        self.terms = 0

    def __call__(self, count: int, generator: torch.Generator) -> Tensor:
        self.terms += count
        return torch.rand(2, count, 3, generator=generator, dtype=torch.float64)


def cuts(total: int, parts: int, seed: int) -> list[int]:
    """Where `total` is cut into parts, some of them empty."""
    inner = torch.randint(total + 1, (parts - 1,), generator=seeded(seed)).sort().values.tolist()
    return [0, *inner, total]


@pytest.mark.parametrize("total", COUNTS)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("chunks", [1, 3])
def test_terms_have_the_same_numbers_in_any_division(total, ranks, chunks):
    streams = [seeded(4) for _ in range(ranks + 1)]
    whole = Draws(Counting(), total, streams[0]).between(0, total)
    ends, found = cuts(total, ranks, seed=ranks), []
    for rank in range(ranks):
        draws = Draws(Counting(), total, streams[rank + 1])
        start, stop = ends[rank], ends[rank + 1]
        inner = [start + cut for cut in cuts(stop - start, chunks, seed=chunks)]
        found += [draws.between(a, b) for a, b in pairwise(inner) if a < b]
    assert torch.equal(torch.cat(found, dim=1), whole)
    # And all streams go on alike, whatever was asked for.
    assert len({float(torch.rand((), generator=stream)) for stream in streams}) == 1


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_few_terms_have_the_numbers_of_the_stream_itself(likelihood):
    module, like = LIKELIHOODS[likelihood](), normal(BLOCK, 4)

    def draw(count: int, generator: torch.Generator) -> Tensor:
        return module.noise(2, torch.Size((count, 4)), like, generator)

    found = Draws(draw, BLOCK, seeded(3)).between(100, 900)
    assert torch.equal(found, draw(BLOCK, seeded(3))[:, 100:900])


@pytest.mark.parametrize("ranks", [16, 4096])
def test_a_rank_draws_little_more_than_its_own_part(ranks):
    """However many ranks there are, and in however many chunks it goes."""
    own = 700
    for rank in (0, 1, ranks // 2, ranks - 1):
        count = Counting()
        draws = Draws(count, own * ranks, seeded(0))
        for start in range(rank * own, (rank + 1) * own, 50):
            draws.between(start, start + 50)
        assert count.terms <= own + 2 * (BLOCK - 1)


def test_child_seeds_fit_a_generator_and_differ():
    seeds = {child_seed(child_seed(5, a), b) for a in range(50) for b in range(50)}
    assert len(seeds) == len({seed % 2**32 for seed in seeds}) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_no_numbers_for_who_needs_none():
    assert Draws(lambda count, generator: None, 5 * BLOCK, seeded()).between(3, 3 * BLOCK) is None


class CountingCategorical(Categorical):
    """Counts the terms that it draws numbers for."""

    terms = 0

    def noise(self, draws, outputs, like, generator):
        type(self).terms += outputs[0]
        return super().noise(draws, outputs, like, generator)


@pytest.mark.parametrize("chunk", [300, 1100])
@torch.no_grad()
def test_statistics_of_many_terms_do_not_depend_on_chunks(chunk):
    model, x = mlp([4, 5, 3]), normal(2 * BLOCK + 300, 4)
    network = network_of(model, Categorical())
    blocks, found = [unit.block for unit in network.units], []
    for size in (None, chunk):
        passes = batch(network, x, chunk=size).passes
        sample = Sample(passes, lambda part: linearize(network, part))
        found.append(tensors_in(estimate(sample, blocks, SampledFisher(), seeded(2))))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, **ALGEBRA)


@torch.no_grad()
def test_the_statistics_of_a_rank_draw_for_its_own_terms():
    """The sum over the ranks' statistics is that of one process; each rank draws a block or two."""
    ranks, own = 8, 600
    model, x = mlp([4, 5, 3]), normal(ranks * own, 4)
    network = network_of(model, CountingCategorical())
    blocks = [unit.block for unit in network.units]

    def statistics(rows: Tensor, **place: Any) -> list[Tensor]:
        CountingCategorical.terms = 0
        passes = batch(network, rows).passes
        sample = Sample(passes, lambda part: linearize(network, part), **place)
        curvature = estimate(sample, blocks, SampledFisher(), seeded(2))
        return [block.G for block in curvature.blocks]

    whole = statistics(x)
    assert CountingCategorical.terms == ranks * own
    total = [torch.zeros_like(G) for G in whole]
    for rank in range(ranks):
        rows = x[rank * own : (rank + 1) * own]
        found = statistics(rows, total=ranks * own, heads=[(ranks * own, rank * own)])
        total = [sum_ + G / ranks for sum_, G in zip(total, found, strict=True)]
        assert CountingCategorical.terms <= own + 2 * (BLOCK - 1)
    for left, right in zip(total, whole, strict=True):
        torch.testing.assert_close(left, right, **ALGEBRA)


@torch.no_grad()
def test_a_rank_without_examples_may_show_one_with_more_terms_than_all_others_have():
    model, x = mlp([4, 5, 3]), normal(6, 4)
    network = network_of(model, Categorical())
    blocks = [unit.block for unit in network.units]
    rows = batch(network, x).scaled(0.0).passes
    for fisher in (SampledFisher(), ExactFisher()):
        sample = Sample(
            rows,
            lambda part: linearize(network, part),
            total=2,
            heads=[(2, 1)],
            weightless=True,
        )
        curvature = estimate(sample, blocks, fisher, seeded(2))
        assert all(not block.G.any() for block in curvature.blocks)
