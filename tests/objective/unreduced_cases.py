"""Losses without a reduction, which the closure masks and averages by hand."""

import torch
from torch import Tensor
from torch.nn import functional

from tests.objective.definitions import irls, nll_curvature, pairs_curvature, with_weights
from tests.objective.loss_cases import (
    CLASS_WEIGHT,
    C,
    Case,
    T,
    classes,
    elements,
    padded,
    pixels,
    real,
    two,
)


def mask(*shape: int) -> Tensor:
    """Every third element is left out, not the first one."""
    flat = torch.arange(torch.Size(shape).numel()) % 3 != 1
    return flat.reshape(shape).double()


def masked(loss: Tensor) -> Tensor:
    """The mean over what the mask leaves."""
    kept = mask(*loss.shape)
    return (loss * kept).sum() / kept.sum()


def share(*shape: int) -> Tensor:
    return mask(*shape) / mask(*shape).sum()


ce, mse = functional.cross_entropy, functional.mse_loss
UNREDUCED: dict[str, Case] = {
    "mse, masked": Case(lambda z, n: masked(mse(z, real(n), reduction="none"))),
    "mse, masked by examples": Case(
        lambda z, n: masked(mse(z, real(n), reduction="none").mean(dim=1))
    ),
    "mse, some elements": Case(
        lambda z, n: mse(z, real(n), reduction="none")[mask(n, C) > 0].mean()
    ),
    "mse, weights, masked": Case(
        lambda z, n: masked(mse(z, real(n), weight=elements(n), reduction="none"))
    ),
    "mse, one output": Case(
        lambda z, n: masked(mse(z[:, 0], real(n)[:, 0], reduction="none")), outputs=1
    ),
    "ce, masked": Case(lambda z, n: masked(ce(z, classes(n), reduction="none"))),
    "ce, images, masked, padding, weights": Case(
        lambda z, n: masked(ce(z, padded(n, T), weight=CLASS_WEIGHT, reduction="none")),
        outputs=C * T,
        ends=pixels,
    ),
    "bce, masked, weights": Case(
        lambda z, n: masked(
            functional.binary_cross_entropy_with_logits(
                z, elements(n), elements(n), pos_weight=CLASS_WEIGHT, reduction="none"
            )
        )
    ),
    "nll, masked": Case(
        lambda z, n: masked(functional.nll_loss(z, classes(n), reduction="none")),
        lambda z, n: nll_curvature(share)(z.reshape(n, C), n),
        ends=lambda z: z.log_softmax(dim=1),
    ),
    "huber, masked": Case(
        lambda z, n: masked(functional.huber_loss(z, real(n), reduction="none", delta=0.8)),
        with_weights(irls(0.8, 1.0, real, summed=True), lambda n: share(n, C)),
    ),
    "gaussian nll, masked": Case(
        lambda z, n: masked(
            functional.gaussian_nll_loss(z[0], real(n)[:, :2], z[1], reduction="none")
        ),
        with_weights(
            pairs_curvature(summed=True),
            lambda n: torch.cat((share(n, 2).flatten(), share(n, 2).flatten())),
        ),
        4,
        two,
    ),
}
