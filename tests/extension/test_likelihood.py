"""A likelihood made from public names: waiting times, y ~ Exp(e^z), for which F_R = 1."""

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.testing import check_likelihood
from tests.conftest import mlp, normal


class Exponential(kronfac.extend.Likelihood):
    """−log r(y|z) = y e^z − z, independent outputs."""

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * outputs.exp() - outputs).sum()

    def noise(self, draws: int, outputs: torch.Size, like: Tensor, generator) -> Tensor:
        return torch.rand((draws, *outputs), dtype=like.dtype, generator=generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return -torch.log1p(-noise) * (-outputs).exp()

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return targets * outputs.exp() - 1

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return vectors

    def fisher_root_columns(self, outputs: Tensor):
        for j in range(outputs.shape[1]):
            yield torch.eye(outputs.shape[1], dtype=outputs.dtype)[j].expand_as(outputs)


def test_it_conforms():
    check_likelihood(Exponential(), normal(5, 2))


def test_a_step_has_its_curvature():
    """F = JᵀJ / terms: the curvature along the step, from the model's prediction, equals the dense one."""
    model, loss, x = mlp([3, 4, 2]), Exponential(), normal(12, 3, seed=1)
    y = normal(12, 2, seed=2).exp()
    settings = {"damping": kronfac.FixedDamping(0.1), "gamma": kronfac.FixedGamma(0.3)}
    optimizer = kronfac.KFAC(
        model, loss, step_rule=kronfac.QuadraticModel(bounded=False, memory=None), **settings
    )
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(
        dict(model.named_parameters())
    )
    J = torch.cat([j.detach().reshape(24, -1) for j in J.values()], dim=1)
    optimizer.step(optimizer.closure(x, y))
    delta = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    # At the minimum along the step M(δ) − M(0) is −½ δᵀ(F + λI)δ.
    curvature = (J @ delta).square().sum() / len(x) + 0.1 * delta.square().sum()
    assert_close(-2 * optimizer.report.predicted_change, float(curvature), rtol=1e-8, atol=0)
