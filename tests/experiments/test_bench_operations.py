"""The counts of `kronfac bench` against torch's own counter and against counts by hand."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kronfac import KFAC, AdaptiveGamma, Bernoulli, BlockTridiagonalInverse, presets
from kronfac.curvature import Curvature, KroneckerMoments, Link
from kronfac_experiments.bench import operations
from kronfac_experiments.bench.power_law import exponent
from kronfac_experiments.bench.schedule import Schedule

WIDTHS = (7, 12, 5, 9)
CASES = 36


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 9)]
    return nn.Sequential(*layers)


class Counter(TorchDispatchMode):
    """torch's own formulas; its own counter has hooks on all modules, past which nothing goes by hand."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # torch leaves out the product that is added in place.
        packet = torch.ops.aten.addmm if packet is torch.ops.aten.addmm_ else packet
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


def counted(run):
    with Counter() as counter:
        run()
    return counter.total


def test_sgd_is_what_torch_counts():
    model, x, y = network(), torch.randn(CASES, 7), torch.rand(CASES, 9).round()
    shapes = operations.shapes_of(WIDTHS)
    assert counted(lambda: Bernoulli()(model(x), y).backward()) == operations.sgd(shapes, CASES)


def test_the_parts_of_a_step_are_what_torch_counts():
    """Decompositions are not in torch's counter: the block-diagonal refresh counts nothing there."""
    kfac = KFAC(network(), Bernoulli(), weight_decay=1e-3, **presets.paper())
    x, y = torch.randn(CASES, 7), torch.rand(CASES, 9).round()
    once, _ = parts_of(kfac)
    usual = sum(once[p] for p in USUAL)
    steps = {k: counted(lambda: kfac.step(kfac.closure(x, y))) for k in range(1, 21)}
    # To a thousandth: torch also counts the products of two numbers in (α, μ).
    assert steps[4] == pytest.approx(usual, rel=1e-3)
    assert steps[5] == pytest.approx(usual + once["reduction_ratio"], rel=1e-3)
    more = 2 * (once["direction"] + once["fisher_products"])
    assert steps[20] == pytest.approx(usual + once["reduction_ratio"] + more, rel=1e-3)


USUAL = ("gradient", "statistics", "direction", "fisher_products")


def parts_of(kfac):
    """Operations of each part, once, and in an average step."""
    schedule = Schedule.of(kfac.settings, CASES)
    parts = operations.kfac(operations.shapes_of(WIDTHS), CASES, schedule, tridiagonal=False)
    return {part: count / schedule.times[part] for part, count in parts.items()}, parts


def test_the_default_settles_at_what_is_counted():
    kfac = KFAC(network(), Bernoulli(), weight_decay=1e-3, gamma=AdaptiveGamma(trusted=0.0))
    x, y = torch.randn(CASES, 7), torch.rand(CASES, 9).round()
    once, parts = parts_of(kfac)
    for _ in range(100):
        kfac.step(kfac.closure(x, y))
    assert not kfac.report.events
    later = sum(counted(lambda: kfac.step(kfac.closure(x, y))) for _ in range(20))
    usual = sum(once[p] for p in USUAL)
    # Twenty steps, four of them with ρ, one with a second γ at the most.
    assert later <= 20 * (sum(parts.values()) - parts["inverse"]) * 1.001
    assert later >= 20 * usual


def test_so_does_a_comparison_of_the_average_where_mini_batches_differ():
    kfac = KFAC(network(), Bernoulli(), weight_decay=1e-3)
    once, _ = parts_of(kfac)
    usual = sum(once[p] for p in USUAL)
    counts = {}
    for k in range(1, 141):
        x, y = torch.randn(CASES, 7), torch.rand(CASES, 9).round()
        counts[k] = counted(lambda x=x, y=y: kfac.step(kfac.closure(x, y)))
        assert k < 120 or not kfac.report.events
    assert kfac.state_dict()["kfac"]["step"]["memory"]["average"] is not None
    assert counts[134] == pytest.approx(usual, rel=1e-3)
    assert counts[135] == pytest.approx(usual + once["reduction_ratio"], rel=1e-3)
    assert counts[140] == pytest.approx(usual + 2 * once["reduction_ratio"], rel=1e-3)


def chain_curvature(widths):
    """Second moments of a chain that is correlated enough for no column to be dropped."""
    torch.manual_seed(0)
    shapes = operations.shapes_of(widths)
    common = torch.randn(400, 40, dtype=torch.float64)
    rows = [
        [common @ torch.randn(40, n, dtype=torch.float64) for n in side]
        for side in zip(*shapes, strict=True)
    ]
    moments = [
        ([x.mT @ x / 400 for x in side], [x.mT @ y / 400 for x, y in zip(side, side[1:])])  # noqa: B905, RUF007
        for side in rows
    ]
    (G, G_next), (A, A_next) = moments
    curvature = Curvature(tuple(map(KroneckerMoments, A, G)), tuple(map(Link, A_next, G_next)))
    return curvature, shapes


def test_the_tridiagonal_direction_is_what_torch_counts():
    curvature, shapes = chain_curvature(WIDTHS)
    damped = BlockTridiagonalInverse().prepare(curvature).damped(1e-3)
    gradient = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    assert counted(lambda: damped.mv(gradient)) == operations.direction(shapes, tridiagonal=True)


def test_the_tridiagonal_statistics_are_what_torch_counts():
    kfac = KFAC(network(), Bernoulli(), inverse="block_tridiagonal", **presets.paper())
    x, y = torch.randn(CASES, 7), torch.rand(CASES, 9).round()
    shapes = operations.shapes_of(WIDTHS)
    for _ in range(3):
        kfac.step(kfac.closure(x, y))
    tri = counted(lambda: kfac.step(kfac.closure(x, y)))
    rank_free = operations.kfac(shapes, CASES, Schedule.of(kfac.settings, CASES), tridiagonal=True)
    times = Schedule.of(kfac.settings, CASES).times
    without_direction = sum(
        rank_free[part] / times[part] for part in ("gradient", "statistics", "fisher_products")
    )
    # What is left is the direction, whose ranks depend on the data and are at most full.
    left = tri - without_direction
    assert operations.direction(shapes, tridiagonal=False) < left
    assert left <= operations.direction(shapes, tridiagonal=True)


def test_refreshes_by_hand():
    d = 10
    two = [(d, d), (d, d)]
    # Cholesky and inverse, ⅓ + ⅔, of four factors.
    assert operations.refresh(two, tridiagonal=False) == 4 * d**3
    # And for each side of the pair: R, Ψ, L⁻¹R and K by triangular solves, the Gram matrix, eigh.
    assert operations.refresh(two, tridiagonal=True) == (4 + 2 * (1 + 1 + 1 + 1 + 2 + 6)) * d**3
    assert operations.exact_tikhonov(two) == 4 * 6 * d**3
    # Narrower next layer: the Gram matrix and eigh of the smaller side, and X F.
    assert operations._conditional(10, 4) == 2 * 16 * 10 + 100 * 4 + 2 * 160 + 6 * 64 + 320 + 400


def test_directions_by_hand():
    d = 10
    two = [(d, d), (d, d)]
    assert operations.direction(two, tridiagonal=False) == 2 * 4 * d**3
    # Λ's correction has four products for the first layer, Ξ and Ξᵀ two each.
    assert operations.direction(two, tridiagonal=True) == (8 + 8 + 4 + 4) * d**3


def test_the_count_is_the_papers_for_a_wide_deep_chain():
    """(3.425 C₁ + 1.25 C₂) ℓd²m + 1.1 C₅ ℓd³ + 0.055 C₃ ℓd³, with [MG15 §8]'s constants.

    With C₁ = C₂ = 2, C₅ = 4 and C₃ = 2, and the two further γ of a search counted in full.
    """
    d, depth, m = 1000, 200, 8000
    unit = depth * d**2 * m
    parts = operations.kfac(
        [(d, d)] * depth, m, Schedule.of_preset("paper", 8000), tridiagonal=False
    )
    assert parts["gradient"] == pytest.approx(3 * 2 * unit, rel=0.01)
    assert parts["statistics"] == pytest.approx((1 / 8 + 2 / 8) * 2 * unit, rel=0.01)
    assert parts["fisher_products"] == pytest.approx(4 / 4 * 1.1 * 2 * unit, rel=0.01)
    assert parts["reduction_ratio"] == pytest.approx(1 / 5 * 2 * unit, rel=0.01)
    cube = depth * d**3
    assert parts["direction"] == pytest.approx(1.1 * 4 * cube)
    assert parts["inverse"] == pytest.approx((1 / 20 + 2 / 20) * 2 * cube)


def test_the_schedule_in_words():
    words = "τ₁ = 1/8, τ₂ = 1/4, T₁ = 5, T₂ = 20, T₃ = 20"
    assert str(Schedule.of_preset("paper", 8000)) == words


@pytest.mark.parametrize("p", [-1.0, 0.0, 1.0, 2.5, 3.0])
def test_the_exponent_of_a_power_law(p):
    x = [128, 256, 512, 2048]
    assert exponent(x, [3.0 * n**p for n in x]) == pytest.approx(p)


def test_no_exponent_from_one_point():
    assert math.isnan(exponent([128], [1.0]))
    assert math.isnan(exponent([128, 128], [1.0, 2.0]))
    assert math.isnan(exponent([128, 256], [0.0, 1.0]))
