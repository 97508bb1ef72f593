"""The first 30 iterations of the MNIST autoencoder beside the authors' logged run.

The long comparison is `kronfac bench authors-run`; its output is in docs/results/paper_figures.md.
"""

import pytest
import torch

import kronfac
from kronfac_experiments import problems
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler

# The objective on the mini-batch before the step, and the mini-batch's size, in the authors' log.
OBJECTIVE = {1: 870.30, 5: 376.16, 10: 261.07, 20: 223.80, 30: 209.81}
BATCH = {1: 1000, 2: 1008, 3: 1016, 4: 1024, 10: 1076, 20: 1168, 30: 1268}


@pytest.fixture
def train(real_data):
    return problems.load("mnist")[0]


def test_the_first_thirty_iterations(train):
    problem = problems.MNIST
    model = problems.build_model(problem, seed=0)
    optimizer = kronfac.KFAC(
        model,
        kronfac.Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=problem.weight_decay,
        **kronfac.presets.paper(),
    )
    sizes = ExponentialBatchSize(1000, len(train), 500)
    sampler = ScheduledBatchSampler(len(train), sizes, seed=0)
    for k in range(1, 31):
        with torch.no_grad():
            decay = sum(p.square().sum() for p in model.parameters()) * problem.weight_decay / 2
        x = train[sampler.next_indices()]
        optimizer.step(optimizer.closure(x, x))
        report = optimizer.report
        assert not report.events
        assert report.examples == BATCH.get(k, report.examples)
        # λ falls at every check, as every ρ is above 3/4; γ stays where it starts.
        assert report.lambda_ == pytest.approx(150 * 0.95 ** (k - k % 5), rel=1e-12)
        assert report.gamma == pytest.approx(12.2474, abs=1e-4)
        assert (report.rho is not None) == (k % 5 == 0)
        if k in OBJECTIVE:
            # Seeds start 3 % apart (one standard deviation); later they are closer.
            assert report.loss + float(decay) == pytest.approx(OBJECTIVE[k], rel=0.08)
