"""A layer type made from public names: one matrix for several patches of the input, K-FAC expand."""

from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.testing import check_adapter
from tests.conftest import normal
from tests.reference.dense import kron


class Patches(nn.Module):
    """Three patches of two inputs each, all multiplied with the same weight; three features for each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(3, 2, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1, 3, 2) @ self.weight.mT).flatten(1)


class PatchesAdapter:
    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return {"weight": module.weight}

    def uses(self, module: nn.Module, args, kwargs, output: Tensor) -> list[kronfac.extend.Use]:
        inputs = {"weight": args[0].view(-1, 3, 2)}
        return [kronfac.extend.Use(inputs, output, arrange=lambda g: g.unflatten(1, (3, 3)))]


kronfac.register(Patches, PatchesAdapter())


def test_it_conforms():
    check_adapter(Patches(), normal(4, 6))


def test_the_direction_is_that_of_the_dense_block():
    """A ⊗ G of the patches: the mean of a aᵀ over all of them, the sum of g gᵀ, here with F_R = I."""
    model, x, y = Patches(), normal(10, 6, seed=1), normal(10, 9, seed=2)
    fixed = {"damping": kronfac.FixedDamping(0.0), "gamma": kronfac.FixedGamma(0.2)}
    norm = kronfac.extend.FactoredTikhonov(norm="one")
    optimizer = kronfac.KFAC(
        model, kronfac.Gaussian(), fisher="exact", step_rule=kronfac.RawStep(1.0),
        inverse=kronfac.extend.BlockDiagonalInverse(norm), **fixed,
    )  # fmt: skip
    a, W = x.view(-1, 2), model.weight.detach().clone()
    A = a.mT @ a / len(a) + 0.2 * normal(2, 2).new_ones(2).diag()
    G = (3 + 0.2) * normal(3, 3).new_ones(3).diag()  # Σ over three places of E[g gᵀ] = I
    residual = (x.view(-1, 3, 2) @ W.mT).flatten(1) - y
    gradient = residual.view(-1, 3).mT @ a / len(x)
    optimizer.step(optimizer.closure(x, y))
    expected = kron(A, G).inverse() @ gradient.mT.reshape(-1)
    assert_close((W - model.weight.detach()).mT.reshape(-1), expected, rtol=1e-9, atol=1e-11)
