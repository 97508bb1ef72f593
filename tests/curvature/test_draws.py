"""Random numbers of all terms at once: the same for any division over ranks and chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac.curvature import EmpiricalFisher, ExactFisher, Fisher, SampledFisher
from kronfac.curvature.estimate import Sample, estimate
from kronfac.linearize import linearize
from kronfac.objective import Categorical
from tests.conftest import ALGEBRA, LIKELIHOODS, batch, mlp, network_of, normal, seeded

RANKS, OWN = 4, 30


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@torch.no_grad()
def test_the_statistics_of_the_ranks_add_up_to_those_of_one_process(likelihood, chunk):
    model, x = mlp([4, 5, 3]), normal(RANKS * OWN, 4)
    network = network_of(model, LIKELIHOODS[likelihood]())
    blocks = [unit.block for unit in network.units]

    def statistics(rows: Tensor, chunk: int | None = None, **place: Any) -> list[Tensor]:
        passes = batch(network, rows, chunk=chunk).passes
        sample = Sample(passes, lambda part: linearize(network, part), **place)
        curvature = estimate(sample, blocks, SampledFisher(samples=2), seeded(2))
        return [block.G for block in curvature.blocks]

    whole = statistics(x)
    total = [torch.zeros_like(G) for G in whole]
    for rank in range(RANKS):
        rows = x[rank * OWN : (rank + 1) * OWN]
        place = {"total": RANKS * OWN, "heads": [(RANKS * OWN, rank * OWN)], "start": rank * OWN}
        found = statistics(rows, chunk, **place)
        total = [sum_ + G / RANKS for sum_, G in zip(total, found, strict=True)]
    for left, right in zip(total, whole, strict=True):
        assert_close(left, right, **ALGEBRA)


@pytest.mark.parametrize("fisher", [SampledFisher(), ExactFisher(), EmpiricalFisher()])
@torch.no_grad()
def test_all_streams_go_on_alike(fisher: Fisher):
    """Whatever part of the terms a rank has."""
    network = network_of(mlp([4, 5, 3]), Categorical())
    blocks, following = [unit.block for unit in network.units], set()
    for rank, own in ((0, 2), (1, 5)):
        rows = batch(network, normal(own, 4), torch.zeros(own, dtype=torch.long)).passes
        place = {"total": 7, "heads": [(7, 2 * rank)], "start": 2 * rank}
        generator = seeded(4)
        estimate(Sample(rows, lambda p: linearize(network, p), **place), blocks, fisher, generator)
        following.add(float(torch.rand((), generator=generator)))
    assert len(following) == 1


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
