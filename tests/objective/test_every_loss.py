"""Every loss with its options against the dense definition, in float64.

The curvature of the objective is F = Jᵀ C J. C is the curvature in what the loss is called with, from its
definition: the Hessian for losses in natural parameters, E_y[g gᵀ] over targets y of the predictive
distribution for the others, a formula if there is neither. K-FAC has to find the same vᵀFv from what it
records, and the same blocks where the Kronecker factorisation is exact.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev
from torch.testing import assert_close

from kronfac.curvature import ExactFisher
from kronfac.linearize import fisher_gram
from kronfac.record import record
from kronfac.record.examples import select
from tests.conftest import AUTODIFF, network_of, normal
from tests.curvature.test_estimate import estimate_on
from tests.objective.loss_cases import CASES, Case, Heads
from tests.objective.unreduced_cases import UNREDUCED
from tests.reference import dense

N = 5
EVERY = CASES | UNREDUCED


def flat(outputs: Any) -> Tensor:
    return torch.cat([z.flatten() for z in (outputs if isinstance(outputs, tuple) else (outputs,))])


def dense_fisher(model: Heads, case: Case, x: Tensor) -> Tensor:
    """Jᵀ C J over the parameters in their order, each flattened by rows."""
    theta = {name: p.detach() for name, p in model.named_parameters()}
    raw = functional_call(model, theta, (x,))
    if case.curvature is not None:
        H = case.curvature(flat(raw).detach(), len(x))
    else:
        H = hessian(lambda v: case.loss(v.reshape(raw.shape), len(x)), flat(raw).detach())
    J = jacrev(lambda values: flat(functional_call(model, values, (x,))))(theta)
    J = torch.cat([part.flatten(1) for part in J.values()], dim=1)
    return J.mT @ H @ J


def recorded(model: Heads, case: Case, x: Tensor):
    network = network_of(model, nn.MSELoss())
    with record(model, network.objective) as recording:
        loss = case.loss(model(x), len(x))
        loss.backward()
    return network, recording.batch(), loss.detach()


def rows_of(network, vector) -> Tensor:
    """A vector over the parameters in their order, each flattened by rows."""
    return torch.cat([part.flatten() for part in network.split(vector)])


@pytest.mark.parametrize("name", EVERY)
def test_the_curvature_along_any_vector_is_that_of_the_definition(name):
    case, x = EVERY[name], normal(N, 4)
    model = Heads(case.outputs, case.ends)
    network, batch, loss = recorded(model, case, x)
    directions = [
        tuple(normal(*unit.shape, seed=10 * k + i) for i, unit in enumerate(network.units))
        for k in range(3)
    ]
    F = dense_fisher(model, case, x)
    assert float(F.trace()) > 0
    V = torch.stack([rows_of(network, v) for v in directions])
    assert_close(fisher_gram(network, batch, directions), V @ F @ V.mT, **AUTODIFF)
    if "declared" not in name:
        assert_close(batch.recorded_loss, loss, **AUTODIFF)


@pytest.mark.parametrize("name", EVERY)
def test_the_blocks_of_one_example_are_those_of_the_definition(name):
    """E[a aᵀ ⊗ g gᵀ] = a aᵀ ⊗ E[g gᵀ] if there is one a."""
    compare_blocks(Heads(EVERY[name].outputs, EVERY[name].ends), EVERY[name], normal(1, 4))


@pytest.mark.parametrize(
    "name",
    [
        "mse",
        "mse, sum",
        "mse, images",
        "gaussian nll, a known variance",
        "huber, quadratic",
        "smooth l1, quadratic",
        "declared",
        "least squares",
        "two losses",
    ],
)
def test_the_blocks_of_a_deep_linear_network_are_those_of_the_definition(name):
    """g is the same for all examples if neither the Jacobian nor C depends on them."""
    case = EVERY[name]
    compare_blocks(Heads(case.outputs, case.ends, "identity"), case, normal(N, 4))


def compare_blocks(model: Heads, case: Case, x: Tensor) -> None:
    """Every A ⊗ G of the exact Fisher with the block of F on the diagonal."""
    network, batch, _ = recorded(model, case, x)
    curvature = estimate_on(network, batch, ExactFisher())
    F = dense_fisher(model, case, x)
    sizes = [unit.shape[0] * unit.shape[1] for unit in network.units]
    for i, (block, unit) in enumerate(zip(curvature.blocks, network.units, strict=True)):
        start, size = sum(sizes[:i]), sizes[i]
        own = F[start : start + size, start : start + size]
        # From rows of the weight and then the bias to columns of V.
        rows, columns = unit.shape
        place = torch.cat(
            (
                torch.arange(rows * (columns - 1)).reshape(rows, -1),
                rows * (columns - 1) + torch.arange(rows)[:, None],
            ),
            dim=1,
        )
        order = place.mT.flatten()
        assert_close(dense.kron(block.A, block.G), own[order][:, order], **AUTODIFF)


@pytest.mark.parametrize("name", EVERY)
def test_some_of_the_examples_have_their_own_curvature(name):
    """The curvature is a sum over examples: parts of the pass add up to all of it."""
    case, x = EVERY[name], normal(N, 4)
    model = Heads(case.outputs, case.ends)
    network, batch, _ = recorded(model, case, x)
    direction = [tuple(normal(*unit.shape, seed=i) for i, unit in enumerate(network.units))]
    (whole,) = batch.passes
    total = sum(
        fisher_gram(network, _one(batch, select(whole, index)), direction)
        for index in (range(2), torch.tensor([2, 4]), range(3, 4))
    )
    assert_close(total, fisher_gram(network, batch, direction), **AUTODIFF)


def _one(batch, part):
    return type(batch)((part,))
