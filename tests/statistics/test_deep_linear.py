"""Where K-FAC is exact: a deep linear network with a Gaussian likelihood.

∂f/∂s_i is the same for all cases there, so E[a aᵀ ⊗ g gᵀ] = E[a aᵀ] ⊗ E[g gᵀ], block by block.
"""

import pytest
from torch import nn
from torch.testing import assert_close

from kronfac.layers import find_layers
from kronfac.objective import objective_of
from kronfac.statistics import ExactFisher, estimate
from tests.conftest import AUTODIFF, batch, mlp, normal, seeded
from tests.reference import dense


@pytest.mark.parametrize("bias", [True, False])
def test_kronecker_blocks_are_the_exact_fisher_blocks(bias):
    model, x = mlp([4, 5, 3, 2], "identity", bias), normal(20, 4)
    loss = objective_of(nn.MSELoss())
    rows = batch(x, 2)
    weight = loss.case_weight(rows.cases, rows.outputs)
    factors = estimate(
        model, find_layers(model), loss, rows, weight, ExactFisher(), seeded(), neighbours=True
    )
    F = dense.exact_fisher(model, x, "gaussian", variance=0.5, scale=1 / 2)
    sizes = [rows * columns for rows, columns in dense.shapes(model)]
    blocks = [row.split(sizes, dim=1) for row in F.split(sizes)]
    for i in range(3):
        assert_close(dense.kron(factors.A[i], factors.G[i]), blocks[i][i], **AUTODIFF)
    for i in range(2):
        block = dense.kron(factors.A_next[i], factors.G_next[i])
        assert_close(block, blocks[i][i + 1], **AUTODIFF)
