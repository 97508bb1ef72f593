"""A second opinion on convolutions and shared weights: curvlinops' K-FAC and EKFAC, written by others."""

import pytest
import torch
from torch import nn

from kronfac.curvature import EigenvalueCorrectedInverse, ExactFisher, ExactTikhonov, KroneckerBlock
from tests.conformance import assert_relative
from tests.conftest import normal
from tests.curvature.test_estimate import estimate_on
from tests.layers.modules import perturbed
from tests.layers.problems import Problem, classification, regression
from tests.layers.test_exact import Pooled, PooledTokens

curvlinops = pytest.importorskip("curvlinops")


NETWORKS = {
    "Linear": (lambda: (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (7, 3)),
    "Linear at places": (
        lambda: (nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), PooledTokens(), nn.Linear(3, 3)),
        (7, 5, 3),
    ),
    "Conv2d": (
        lambda: (
            nn.Conv2d(2, 3, 3, stride=(1, 2), padding=(1, 2)),
            nn.Tanh(),
            nn.Conv2d(3, 2, 2, dilation=2, bias=False),
            nn.Sigmoid(),
            Pooled(),
            nn.Linear(2, 3),
        ),
        (7, 2, 6, 5),
    ),
    "Conv2d, flattened": (
        lambda: (nn.Conv2d(2, 3, 3, padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)),
        (7, 2, 4, 3),
    ),
}
each_network = pytest.mark.parametrize("name", NETWORKS)
each_problem = pytest.mark.parametrize("make", [regression, classification])
each_sharing = pytest.mark.parametrize("sharing", ["expand", "reduce"])


def problem_of(name, make, sharing) -> Problem:
    layers, shape = NETWORKS[name]
    model = perturbed(nn.Sequential(*layers())).double()
    return make(model, normal(*shape), block=lambda block: KroneckerBlock(sharing))


def theirs(problem: Problem, kind, sharing):
    return kind(
        problem.model,
        problem.loss,
        list(problem.model.parameters()),
        [(problem.x, problem.y)],
        fisher_type=curvlinops.FisherType.TYPE2,
        kfac_approx=getattr(curvlinops.KFACType, sharing.upper()),
        separate_weight_and_bias=False,
        check_deterministic=False,
    )


def in_their_order(problem: Problem, matrices) -> list[torch.Tensor]:
    """Tensors like `model.parameters()`."""
    found = zip(problem.network.parameters, problem.network.split(matrices), strict=True)
    by_id = {id(p): t for p, t in found}
    return [by_id[id(p)] for p in problem.model.parameters()]


def direction(problem: Problem):
    return tuple(normal(*unit.shape, seed=n) for n, unit in enumerate(problem.network.units))


@each_network
@each_problem
@each_sharing
def test_kronecker_blocks_are_theirs(name, make, sharing):
    problem = problem_of(name, make, sharing)
    V = direction(problem)
    blocks = problem.curvature().blocks
    ours = tuple(b.G @ v @ b.A for b, v in zip(blocks, V, strict=True))
    operator = theirs(problem, curvlinops.KFACLinearOperator, sharing)
    expected = operator @ in_their_order(problem, V)
    for left, right in zip(in_their_order(problem, ours), expected, strict=True):
        assert_relative(left, right.detach(), 1e-8)


@each_network
@each_problem
def test_eigenvalue_corrected_blocks_are_theirs(name, make):
    """(F + γ²I)⁻¹ of ours, then F + γ²I of theirs."""
    problem, gamma = problem_of(name, make, "expand"), 0.3
    strategy = EigenvalueCorrectedInverse(ExactTikhonov())
    inverse = strategy.prepare(problem.curvature()).damped(gamma)
    update = strategy.between_refreshes(inverse, 0.0)
    estimate_on(problem.network, problem.batch, ExactFisher(), update=update)
    V = direction(problem)
    U = in_their_order(problem, update.value().mv(V))
    operator = theirs(problem, curvlinops.EKFACLinearOperator, "expand")
    back = [F_u + gamma**2 * u for F_u, u in zip(operator @ U, U, strict=True)]
    for left, right in zip(in_their_order(problem, V), back, strict=True):
        assert_relative(right.detach(), left, 1e-8)
