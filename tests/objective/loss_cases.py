"""Losses with their options, each with its curvature in what the model returns."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.nn import functional

import kronfac
from tests.conftest import mlp, normal, seeded
from tests.objective.definitions import (
    as_sum,
    irls,
    nll_curvature,
    number,
    pairs_curvature,
    poisson,
    probability_curvature,
    with_weights,
)

C, T = 3, 2
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)


class Heads(nn.Module):
    """A network whose outputs a function turns into what the losses are called with."""

    def __init__(
        self, outputs: int, ends: Callable[[Tensor], Any], activation: str = "tanh"
    ) -> None:
        super().__init__()
        self.body, self.ends = mlp([4, 5, outputs], activation, seed=2), ends

    def forward(self, x: Tensor) -> Any:
        return self.ends(self.body(x))


@dataclass(frozen=True)
class Case:
    """A loss of what the model returns, and its curvature there."""

    loss: Callable[[Any, int], Tensor]
    """From what the model returns and the number of examples."""
    curvature: Callable[[Tensor, int], Tensor] | None = None
    """C of all that the model returns, flattened; None for the Hessian of the loss."""
    outputs: int = C
    ends: Callable[[Tensor], Any] = field(default=lambda z: z)


def uniform(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=seeded(seed), dtype=torch.float64)


def classes(n: int, *more: int) -> Tensor:
    return torch.randint(C, (n, *more), generator=seeded(n + 4))


def padded(n: int, *more: int) -> Tensor:
    """Classes, every other one ignored but the first."""
    y = classes(n, *more).flatten()
    y[1::2] = -100
    return y.reshape(n, *more)


def counts(n: int) -> Tensor:
    return torch.randint(5, (n, C), generator=seeded(6)).double()


def signs(n: int) -> Tensor:
    return normal(n, C, seed=9).sign()


mse, ce = functional.mse_loss, functional.cross_entropy
logits_bce, nll = functional.binary_cross_entropy_with_logits, functional.nll_loss
huber, smooth = functional.huber_loss, functional.smooth_l1_loss
gaussian = functional.gaussian_nll_loss


def real(n: int) -> Tensor:
    return 1.5 * normal(n, C, seed=3)


def pixels(z: Tensor) -> Tensor:
    return z.reshape(-1, C, T)


def two(z: Tensor) -> tuple[Tensor, Tensor]:
    return z[:, :2], functional.softplus(z[:, 2:])


def elements(n: int) -> Tensor:
    return uniform(n, C, seed=5) + 0.1


def kept(n: int, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """What each class index counts in a mean over those that are not ignored."""
    w = torch.ones(C, dtype=torch.float64) if weight is None else weight
    found = w[y.clamp(min=0)] * (y >= 0)
    return found / found.sum()


def fixed(n: int) -> Tensor:
    return uniform(n, C, seed=8) + 0.2


def residuals(z: Tensor) -> tuple[Tensor, Tensor]:
    return z[:, :2] ** 2 - 1, z[:, 2:].sin()


GN = kronfac.GaussNewton
CASES: dict[str, Case] = {
    "mse": Case(lambda z, n: mse(z, real(n))),
    "mse, sum": Case(lambda z, n: mse(z, real(n), reduction="sum")),
    "mse, element weights": Case(lambda z, n: mse(z, real(n), weight=elements(n))),
    "mse, element weights, sum": Case(
        lambda z, n: mse(z, real(n), weight=elements(n), reduction="sum")
    ),
    "mse, images": Case(lambda z, n: mse(z, normal(n, C, T)), outputs=C * T, ends=pixels),
    "bce of logits": Case(lambda z, n: logits_bce(z, uniform(n, C))),
    "mse, one output": Case(
        lambda z, n: mse(z, real(n)[:, 0]), outputs=1, ends=lambda z: z.squeeze(1)
    ),
    "bce of logits, sum": Case(lambda z, n: logits_bce(z, uniform(n, C), reduction="sum")),
    "bce of logits, weights of the outputs": Case(
        lambda z, n: logits_bce(z, uniform(n, C), elements(1)[0])
    ),
    "bce of logits, weights, sum": Case(
        lambda z, n: logits_bce(
            z, uniform(n, C), elements(n), pos_weight=CLASS_WEIGHT, reduction="sum"
        )
    ),
    "bce of logits, positive weights": Case(
        lambda z, n: logits_bce(z, uniform(n, C), pos_weight=CLASS_WEIGHT)
    ),
    "bce of logits, weights": Case(
        lambda z, n: logits_bce(z, uniform(n, C), elements(n), pos_weight=CLASS_WEIGHT)
    ),
    "ce": Case(lambda z, n: ce(z, classes(n))),
    "ce, sum": Case(lambda z, n: ce(z, classes(n), reduction="sum")),
    "ce, smoothing": Case(lambda z, n: ce(z, classes(n), label_smoothing=0.2)),
    "ce, smoothing, sum, soft targets": Case(
        lambda z, n: ce(z, normal(n, C).softmax(dim=1), label_smoothing=0.2, reduction="sum")
    ),
    "ce, weights": Case(lambda z, n: ce(z, classes(n), CLASS_WEIGHT)),
    "ce, weights, smoothing, soft targets": Case(
        lambda z, n: ce(z, normal(n, C).softmax(dim=1), CLASS_WEIGHT, label_smoothing=0.3)
    ),
    "ce, another ignore_index, sum": Case(
        lambda z, n: ce(z, classes(n).clamp(min=1), ignore_index=2, reduction="sum")
    ),
    "ce, padding, weights, sum": Case(lambda z, n: ce(z, padded(n), CLASS_WEIGHT, reduction="sum")),
    "ce, padding, smoothing": Case(lambda z, n: ce(z, padded(n), label_smoothing=0.2)),
    "ce, padding": Case(lambda z, n: ce(z, padded(n))),
    "ce, padding, weights, smoothing": Case(
        lambda z, n: ce(z, padded(n), weight=CLASS_WEIGHT, label_smoothing=0.1)
    ),
    "ce, soft targets": Case(lambda z, n: ce(z, normal(n, C).softmax(dim=1), CLASS_WEIGHT)),
    "ce, images": Case(lambda z, n: ce(z, padded(n, T)), outputs=C * T, ends=pixels),
    "ce, images, soft targets": Case(
        lambda z, n: ce(z, normal(n, C, T).softmax(dim=1)), outputs=C * T, ends=pixels
    ),
    "ce, images, weights": Case(
        lambda z, n: ce(z, padded(n, T), weight=CLASS_WEIGHT), outputs=C * T, ends=pixels
    ),
    "ce, tokens": Case(
        lambda z, n: ce(z.movedim(1, -1).reshape(-1, C), padded(n, T).flatten()),
        outputs=C * T,
        ends=pixels,
    ),
    "two losses": Case(lambda z, n: 0.3 * mse(z[:, :1], real(n)[:, :1]) + 2 * mse(z, real(n))),
    "two heads": Case(
        lambda z, n: ce(z[:, :2], classes(n).clamp(max=1)) + 0.5 * mse(z[:, 2:], real(n)[:, 2:]),
        curvature=lambda z, n: hessian(
            lambda v: (
                ce(v.reshape(n, C)[:, :2], classes(n).clamp(max=1))
                + 0.5 * mse(v.reshape(n, C)[:, 2:], real(n)[:, 2:])
            ),
            z,
        ),
    ),
    "bce of probabilities": Case(
        lambda z, n: functional.binary_cross_entropy(z, uniform(n, C)),
        probability_curvature,
        ends=torch.sigmoid,
    ),
    "bce of probabilities, weights": Case(
        lambda z, n: functional.binary_cross_entropy(z, uniform(n, C), elements(n)),
        with_weights(probability_curvature, elements),
        ends=torch.sigmoid,
    ),
    "bce of probabilities, sum": Case(
        lambda z, n: nn.BCELoss(reduction="sum")(z, uniform(n, C)),
        as_sum(probability_curvature),
        ends=torch.sigmoid,
    ),
    "bce of probabilities as of logits": Case(
        lambda z, n: functional.binary_cross_entropy(z.sigmoid(), uniform(n, C)),
        lambda z, n: hessian(lambda v: logits_bce(v, uniform(n, C).flatten()), z),
    ),
    "poisson": Case(lambda z, n: functional.poisson_nll_loss(z, counts(n)), poisson()),
    "poisson, full, sum": Case(
        lambda z, n: functional.poisson_nll_loss(z, counts(n), full=True, reduction="sum"),
        as_sum(poisson()),
    ),
    "poisson of rates": Case(
        lambda z, n: functional.poisson_nll_loss(z, counts(n), log_input=False),
        poisson(log_input=False),
        ends=functional.softplus,
    ),
    "poisson of rates, eps": Case(
        lambda z, n: nn.PoissonNLLLoss(log_input=False, eps=0.1)(z, counts(n)),
        poisson(log_input=False, eps=0.1),
        ends=functional.softplus,
    ),
    "nll": Case(
        lambda z, n: nll(z, classes(n)),
        lambda z, n: nll_curvature(lambda n: torch.ones(n).double() / n)(z.reshape(n, C), n),
        ends=lambda z: z.log_softmax(dim=1),
    ),
    "nll, padding, weights": Case(
        lambda z, n: nll(z, padded(n), weight=CLASS_WEIGHT),
        lambda z, n: nll_curvature(lambda n: kept(n, padded(n), CLASS_WEIGHT))(z.reshape(n, C), n),
        ends=lambda z: z.log_softmax(dim=1),
    ),
    "nll, images": Case(
        lambda z, n: nll(z, padded(n, T), weight=CLASS_WEIGHT),
        lambda z, n: nll_curvature(lambda n: kept(n, padded(n, T), CLASS_WEIGHT))(
            z.reshape(n, C, T), n
        ),
        outputs=C * T,
        ends=lambda z: pixels(z).log_softmax(dim=1),
    ),
    "nll as ce": Case(
        lambda z, n: nn.NLLLoss()(z.log_softmax(dim=1), padded(n)),
        lambda z, n: hessian(lambda v: ce(v.reshape(n, C), padded(n)), z),
    ),
    "gaussian nll": Case(
        lambda z, n: gaussian(z[0], real(n)[:, :2], z[1]), pairs_curvature(), 4, two
    ),
    "gaussian nll, full, sum": Case(
        lambda z, n: gaussian(z[0], real(n)[:, :2], z[1], full=True, reduction="sum"),
        pairs_curvature(summed=True),
        4,
        two,
    ),
    "gaussian nll, variances below eps": Case(
        lambda z, n: nn.GaussianNLLLoss(eps=0.7)(z[0], real(n)[:, :2], z[1]),
        pairs_curvature(eps=0.7),
        4,
        two,
    ),
    "gaussian nll, one variance for two means": Case(
        lambda z, n: gaussian(input=z[0], target=real(n)[:, :2], var=z[1]),
        pairs_curvature(shared=True),
        3,
        two,
    ),
    "gaussian nll, one variance without a dimension": Case(
        lambda z, n: gaussian(z[0], real(n)[:, :2], z[1]),
        pairs_curvature(shared=True),
        3,
        lambda z: (z[:, :2], functional.softplus(z[:, 2])),
    ),
    "gaussian nll, known variances": Case(lambda z, n: gaussian(z, real(n), fixed(n))),
    "gaussian nll, a known variance": Case(lambda z, n: gaussian(z, real(n), 0.3, reduction="sum")),
    "gaussian nll, known variances below eps": Case(
        lambda z, n: gaussian(z, real(n), fixed(n), eps=0.5)
    ),
    "huber": Case(lambda z, n: huber(z, real(n), delta=0.8), irls(0.8, 1.0, real)),
    "huber, sum": Case(
        lambda z, n: nn.HuberLoss(reduction="sum", delta=0.8)(z, real(n)),
        irls(0.8, 1.0, real, summed=True),
    ),
    "huber, weights": Case(
        lambda z, n: huber(z, real(n), weight=elements(n)),
        with_weights(
            irls(1.0, 1.0, real), lambda n: elements(n) * elements(n).numel() / elements(n).sum()
        ),
    ),
    "huber, quadratic": Case(lambda z, n: huber(z, real(n), delta=50.0)),
    "smooth l1": Case(lambda z, n: smooth(z, real(n), beta=0.4), irls(0.4, 2.5, real)),
    "smooth l1, quadratic": Case(lambda z, n: nn.SmoothL1Loss(beta=50.0)(z, real(n))),
    "gauss-newton of huber": Case(lambda z, n: GN(nn.HuberLoss(delta=0.8))(z, real(n))),
    "gauss-newton of soft margins, sum": Case(
        lambda z, n: GN(nn.SoftMarginLoss(reduction="sum"))(z, signs(n))
    ),
    "gauss-newton of ce": Case(lambda z, n: GN(nn.CrossEntropyLoss())(z, classes(n))),
    "gauss-newton of images": Case(
        lambda z, n: GN(nn.CrossEntropyLoss())(z, classes(n, T)), outputs=C * T, ends=pixels
    ),
    "gauss-newton of a function": Case(
        lambda z, n: (
            0.7 * GN(lambda z, y: (z - y).square().sum(dim=1).add(1).sqrt().mean())(z, real(n))
        ),
    ),
    "declared": Case(
        lambda z, n: (
            (kronfac.observe(z, kronfac.Gaussian(0.5), scale=1 / n) - real(n)).square().sum() / n
        )
    ),
    "declared gauss-newton": Case(
        lambda z, n: (
            (
                kronfac.observe(
                    z, GN(lambda z, y: (z - y).pow(4).mean()), targets=real(n), scale=1 / n
                )
                - real(n)
            )
            .pow(4)
            .mean()
        )
    ),
    "least squares": Case(lambda z, n: kronfac.least_squares(z - real(n))),
    "least squares, weights": Case(
        lambda z, n: (
            kronfac.least_squares(z - real(n), 0.3)
            + kronfac.least_squares(z, uniform(n), reduction="sum")
            + kronfac.least_squares(z, elements(n))
            + kronfac.least_squares(z, 0.2, reduction="sum")
        )
    ),
    "residuals": Case(
        lambda z, n: kronfac.least_squares(z[0], 0.1) + 3 * kronfac.least_squares(z[1]),
        lambda z, n: torch.diag(
            torch.cat((number(0.2 / (2 * n)).expand(2 * n), number(6 / n).expand(n)))
        ),
        ends=residuals,
    ),
}
