"""A conformance kit for likelihoods."""

import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac.objective import Likelihood

DRAWS = 20_000
"""Samples for E[score scoreᵀ] = F_R; its entries then have a standard error of about a hundredth."""


def check_likelihood(
    likelihood: Likelihood, outputs: Tensor, seed: int = 0, targets: Tensor | None = None
) -> None:
    """Check what K-FAC relies on, at some outputs (terms, event) in float64.

    - the score is the gradient of the negative log-likelihood;
    - Σ_j r_j r_jᵀ over its root's columns is F_R, as its products have it;
    - E[r rᵀ] over its sampled scores r is F_R, within five standard errors;
    - the terms are independent: some of them alone have the same scores and the same F_R.

    Args:
        likelihood: what is checked.
        outputs: z.
        seed: of the generator that targets are drawn with.
        targets: for a curvature that depends on them; None for targets that the likelihood draws.

    Raises:
        AssertionError: it does not hold.
    """
    outputs = outputs.detach().double()
    generator = torch.Generator().manual_seed(seed)
    noise = likelihood.noise(DRAWS, outputs.shape, outputs, generator)
    if targets is None:
        targets = likelihood.sample(outputs, noise[0])
    likelihood.check(outputs, targets)
    given = likelihood.given(targets)

    leaf = outputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(given.negative_log_likelihood(leaf, targets), leaf)
    score = given.score(outputs, targets)
    _same(score, slope)

    F = _fisher(given, outputs)
    root = torch.stack(list(given.fisher_root_columns(outputs)), dim=-1)
    _same(root @ root.mT, F)

    # Draw after draw as further terms, which is one call.
    repeated = likelihood.given(targets.repeat(DRAWS, *(1 for _ in targets.shape[1:])))
    scores = repeated.sampled_score(outputs.repeat(DRAWS, 1), noise.flatten(0, 1))
    scores = scores.reshape(DRAWS, *outputs.shape)
    products = torch.einsum("dti,dtj->dtij", scores, scores)
    error = 5 * products.std(dim=0) / DRAWS**0.5
    assert bool(((products.mean(dim=0) - F).abs() <= error + 1e-10 * (1 + F.abs())).all()), (
        f"E[score scoreᵀ] is not F_R:\n{products.mean(dim=0)}\ninstead of\n{F}"
    )

    for part in (slice(1), slice(1, None)):
        some, own = outputs[part], likelihood.given(targets[part])
        _same(own.score(some, targets[part]), score[part])
        _same(own.sampled_score(some, noise[0][part]), scores[0][part])
        _same(_fisher(own, some), F[part])


def _same(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=1e-8, atol=1e-10)


def _fisher(likelihood: Likelihood, outputs: Tensor) -> Tensor:
    """F_R by its products with the unit vectors, (terms, event, event)."""
    terms, event = outputs.shape
    basis = torch.eye(event, dtype=outputs.dtype)[:, None].expand(event, terms, event)
    return likelihood.fisher_product(outputs, basis).movedim(0, -1)
