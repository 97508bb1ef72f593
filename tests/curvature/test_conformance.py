"""Every inverse against the dense matrix that it is the inverse of."""

import pytest
import torch

from kronfac.curvature import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    ExactTikhonov,
    FactoredTikhonov,
)
from kronfac.storage import pack, unpack
from tests.conformance import CHECKS, Case
from tests.conftest import normal
from tests.curvature.problems import curvature_from, network
from tests.reference import dense

NORMS = ["trace", "one"]


def case(label, net, strategy, gamma, matrix):
    A, G, shapes = network(net)

    def build():
        return strategy.prepare(curvature_from(A, G)).damped(gamma).mv

    def loaded():
        damped = strategy.prepare(curvature_from(A, G)).damped(gamma)
        return unpack(pack(damped)).mv

    name = f"{label}-{net}-γ={gamma}"
    return [
        Case(name, build, lambda: matrix(A, G, gamma), shapes),
        Case(f"{name}-loaded", loaded, lambda: matrix(A, G, gamma), shapes),
    ]


def diagonal_case(norm, net, gamma):
    return case(
        f"diagonal-{norm}",
        net,
        BlockDiagonalInverse(FactoredTikhonov(norm)),
        gamma,
        lambda A, G, gamma: dense.block_diagonal_fisher(
            *dense.factored_tikhonov(A, G, gamma, norm)
        ),
    )


def exact_case(net, gamma):
    return case(
        "diagonal-exact", net, BlockDiagonalInverse(ExactTikhonov()), gamma, dense.exact_tikhonov
    )


def tridiagonal_case(norm, net, gamma):
    return case(
        f"tridiagonal-{norm}",
        net,
        BlockTridiagonalInverse(FactoredTikhonov(norm)),
        gamma,
        lambda A, G, gamma: dense.block_tridiagonal_fisher(
            *dense.factored_tikhonov(A, G, gamma, norm)
        ),
    )


CASES = [
    case
    for cases in [
        *(diagonal_case(norm, net, 0.3) for norm in NORMS for net in ("deep", "no_bias")),
        diagonal_case("trace", "few_cases", 0.03),
        diagonal_case("trace", "one_layer", 0.3),
        exact_case("deep", 0.3),
        exact_case("no_bias", 0.3),
        exact_case("few_cases", 0.03),
        *(tridiagonal_case(norm, net, 0.3) for norm in NORMS for net in ("deep", "no_bias")),
        *(
            tridiagonal_case("trace", net, gamma)
            for net, gamma in [("few_cases", 0.03), ("two_layers", 0.1), ("one_layer", 0.3)]
        ),
    ]
    for case in cases
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("strategy", [BlockDiagonalInverse(), BlockTridiagonalInverse()])
def test_one_preparation_serves_several_gammas(strategy):
    A, G, shapes = network("deep")
    prepared = strategy.prepare(curvature_from(A, G))
    V = dense.unflatten(normal(sum(rows * columns for rows, columns in shapes)), shapes)
    together = [prepared.damped(gamma).mv(V) for gamma in (1.0, 0.1, 1.0)]
    alone = strategy.prepare(curvature_from(A, G)).damped(1.0).mv(V)
    for first, again, fresh in zip(together[0], together[2], alone, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(first, fresh)
