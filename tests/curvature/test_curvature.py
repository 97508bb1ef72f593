from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    Curvature,
    KroneckerBlock,
    KroneckerMoments,
    SampledFisher,
    Tap,
    ema_decay,
)
from kronfac.curvature.estimate import Sample, estimate
from kronfac.objective import Gaussian, Terms
from kronfac.storage import tensors_in
from tests.conftest import ALGEBRA, normal, seeded
from tests.reference import dense

WIDTHS = (3, 4, 2)


def rows(seed: int, count: int = 6) -> list[torch.Tensor]:
    """Rows of each layer, (count, features)."""
    return [normal(count, width, seed=seed + i) for i, width in enumerate(WIDTHS)]


@dataclass(frozen=True)
class Part:
    """A micro-batch whose inputs and gradients are given."""

    a: list[torch.Tensor]
    g: list[torch.Tensor]
    apart = True

    @property
    def examples(self):
        return len(self.a[0])

    @property
    def terms(self):
        return [Terms(Gaussian(), torch.Size((self.examples, 1)), scale=3.0)]

    @property
    def outputs(self):
        return [torch.zeros(self.examples, 1, dtype=torch.float64)]

    def taps(self, vectors):
        """One use of every unit, at one place; the vectors make no difference."""
        pairs = zip(self.a, self.g, strict=True)
        return [[Tap(a.unsqueeze(1), g.unsqueeze(1))] for a, g in pairs]


def averaged(old, decay, *parts, neighbours=True) -> Curvature:
    """Ā is a mean over the examples, G three times the sum over them."""
    links = [True] * (len(WIDTHS) - 1) if neighbours else []
    return estimate(
        Sample([Part(a, g) for a, g in parts], lambda part: part),
        [KroneckerBlock()] * len(parts[0][0]),
        SampledFisher(),
        seeded(),
        links=links,
        old=old,
        decay=decay,
    )


@pytest.mark.parametrize(
    ("iteration", "ceiling", "expected"),
    [
        (1, 0.95, 0),
        (2, 0.95, 0.5),
        (10, 0.95, 0.9),
        (20, 0.95, 0.95),
        (21, 0.95, 0.95),
        (3, 0.5, 0.5),
    ],
)
def test_decay_is_that_of_a_plain_average_up_to_its_ceiling(iteration, ceiling, expected):
    assert ema_decay(iteration, ceiling) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("iteration", "memory", "expected"),
    [
        (10, 80.0, 0.9),  # a plain average all the same
        (30, 1.0, 0.95),
        (300, 20.0, 0.95),
        (300, 45.0, 1 - 1 / 45),
    ],
)
def test_without_a_ceiling_it_is_the_papers_or_that_of_momentum(iteration, memory, expected):
    assert ema_decay(iteration, memory=memory) == pytest.approx(expected, rel=1e-15)
    assert ema_decay(iteration, 0.5, memory) == 0.5


def test_the_first_iterations_are_a_plain_average():
    """ε = 1 − 1/k gives every one of the first estimates the same weight [MG15 §5]."""
    running = None
    for k in range(1, 6):
        running = averaged(running, ema_decay(k, 0.95), (rows(10 * k), rows(10 * k + 5)))
    estimates = [averaged(None, 0.0, (rows(10 * k), rows(10 * k + 5))) for k in range(1, 6)]
    for found, *single in zip(tensors_in(running), *map(tensors_in, estimates), strict=True):
        assert_close(found, torch.stack(single).mean(0), **ALGEBRA)


def test_examples_are_as_many_as_would_be_as_sure_with_equal_weights():
    """A mean with weights w of independent examples has the variance of one over 1/Σw² of them."""
    running, weights = None, torch.empty(0, dtype=torch.float64)
    for k, count in enumerate((4, 7, 5, 12, 3) * 6, start=1):
        decay = ema_decay(k, 0.9)
        running = averaged(running, decay, (rows(10 * k, count), rows(10 * k + 5, count)))
        new = torch.full((count,), (1 - decay) / count, dtype=torch.float64)
        weights = torch.cat([decay * weights, new])
        assert running.examples == pytest.approx(1 / float(weights.square().sum()), rel=1e-12)
    assert float(weights.sum()) == pytest.approx(1)


def test_sampling_error_is_that_of_a_parameter_on_average():
    curvature = averaged(None, 0.0, (rows(0), rows(5)))
    total = parameters = 0.0
    for block in curvature.blocks:
        for _ in range(len(block.A) * len(block.G)):
            total += float(torch.linalg.eigvalsh(dense.kron(block.A, block.G)).sum())
            parameters += 1
    assert curvature.sampling_error() == pytest.approx(total / parameters / 6**2, rel=1e-12)


@pytest.mark.parametrize("cases", [400, 1600])
def test_the_sampling_error_makes_up_for_what_an_inverse_is_too_large_by(cases):
    """The excess for white rows, whose second moment is the identity, with d/n of 1/8 and 1/32."""
    rows = normal(cases, 50, seed=1)
    A = rows.mT @ rows / cases
    added = Curvature((KroneckerMoments(A, A),), examples=cases).sampling_error() ** 0.5
    eigenvalues = torch.linalg.eigvalsh(A)
    too_large = float((1 / eigenvalues).mean()) - 1
    assert too_large == pytest.approx(50 / cases, rel=0.2)
    assert abs(float((1 / (eigenvalues + added)).mean()) - 1) < too_large / 6


def test_the_mean_curvature_is_the_trace_over_the_dimension():
    curvature = averaged(None, 0.0, (rows(0), rows(5)))
    eigenvalues = torch.cat(
        [torch.linalg.eigvalsh(dense.kron(block.A, block.G)) for block in curvature.blocks]
    )
    assert curvature.mean() == pytest.approx(float(eigenvalues.mean()), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_mean_that_says_nothing_is_1(value):
    M = torch.full((2, 2), value, dtype=torch.float64)
    assert Curvature((KroneckerMoments(M, M),)).mean() == 1.0


def test_statistics_of_another_network_do_not_mix():
    previous = averaged(None, 0.0, (rows(0)[:2], rows(5)[:2]), neighbours=False)
    with pytest.raises(ValueError, match="2 units"):
        averaged(previous, 0.5, (rows(0), rows(5)))
