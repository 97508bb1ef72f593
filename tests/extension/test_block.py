"""A curvature block made from public names: a multiple of the identity, the mean of a diagonal."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.testing import check_block
from tests.conftest import normal


@dataclass(frozen=True)
class MeanMoments(kronfac.extend.DiagonalMoments):
    def damped(self, gamma: float, tikhonov: object):
        return kronfac.extend.DiagonalMoments(self.D.mean().expand_as(self.D)).damped(
            gamma, tikhonov
        )

    def dense(self) -> Tensor:
        return self.D.mean() * torch.eye(self.size, dtype=self.D.dtype)


@dataclass(frozen=True)
class MeanBlock(kronfac.extend.DiagonalBlock):
    moments = MeanMoments

    def observe(self, taps, weight: float) -> MeanMoments:
        return MeanMoments(super().observe(taps, weight).D)


class Plain(nn.Linear):
    """A Linear that wants it."""


class PlainAdapter(kronfac.extend.LinearAdapter):
    def block(self, module: nn.Module) -> kronfac.extend.Block:
        return MeanBlock()


kronfac.register(Plain, PlainAdapter())


def test_it_conforms():
    check_block(MeanBlock())


def test_the_step_is_the_gradient_over_the_mean_curvature():
    """One output, F_R = 1: the mean square of the gradients is that of ā."""
    model, x, y = Plain(3, 1, dtype=torch.float64), normal(20, 3), normal(20, 1, seed=1)
    fixed = {"damping": kronfac.FixedDamping(0.0), "gamma": kronfac.FixedGamma(0.5)}
    step = {"step_rule": kronfac.RawStep(1.0), "fisher": "exact"}
    optimizer = kronfac.KFAC(model, kronfac.Gaussian(), **fixed, **step)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    homogeneous = torch.cat([x, torch.ones(20, 1, dtype=x.dtype)], dim=1)
    gradient = (model(x) - y).detach().mT @ homogeneous / 20
    optimizer.step(optimizer.closure(x, y))
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    expected = -gradient[0] / (homogeneous.square().mean() + 0.25)
    assert_close(after - before, expected, rtol=1e-9, atol=1e-11)
