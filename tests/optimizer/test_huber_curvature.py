"""What curvature trains a Huber loss best: docs/deviations.md quotes this."""

import pytest
import torch
from torch import Tensor, nn

import kronfac

LOSS = nn.HuberLoss(delta=0.3)


class Constant(kronfac.Huber):
    """The curvature of the quadratic zone, everywhere."""

    def given(self, targets: Tensor) -> "Constant":
        return self


def outliers(seed: int, share: float, size: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, w = normal(1000, 8), normal(8, 3)
    y = torch.sin(x @ w) * 2 + 0.05 * normal(1000, 3)
    far = torch.rand(1000, 3, generator=generator) < share
    return x, torch.where(far, y + size * normal(1000, 3), y)


def trained(loss: nn.Module, seed: int, share: float, size: float) -> float:
    torch.manual_seed(seed)
    x, y = outliers(seed, share, size)
    widths = (nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    model = nn.Sequential(*widths)
    optimizer = kronfac.KFAC(model, loss)
    for _ in range(100):
        optimizer.step(optimizer.closure(x, y))
    return float(LOSS(model(x), y).detach())


@pytest.mark.slow
@pytest.mark.parametrize(("share", "size"), [(0.1, 5.0), (0.3, 20.0)])
def test_the_majorising_curvature_ends_lower_than_the_hessian_and_a_constant(share, size):
    losses = (LOSS, kronfac.GaussNewton(LOSS), Constant(0.3))
    means = [sum(trained(loss, seed, share, size) for seed in range(3)) / 3 for loss in losses]
    assert means[0] < min(means[1:])
