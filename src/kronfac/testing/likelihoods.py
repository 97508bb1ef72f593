"""A conformance kit for likelihoods."""

import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac.objective import Likelihood

DRAWS = 20_000
"""Samples for E[score scoreᵀ] = F_R; its entries then have a standard error of about a hundredth."""


def check_likelihood(likelihood: Likelihood, outputs: Tensor, seed: int = 0) -> None:
    """Check what K-FAC relies on, at some outputs (terms, event) in float64.

    - the score is the gradient of the negative log-likelihood, at targets that the likelihood draws;
    - Σ_j r_j r_jᵀ over its root's columns is F_R, as its products have it;
    - E[score scoreᵀ] over its own targets is F_R, within five standard errors.

    Raises:
        AssertionError: it does not hold.
    """
    outputs = outputs.detach().double()
    generator = torch.Generator().manual_seed(seed)
    terms, event = outputs.shape
    noise = likelihood.noise(DRAWS, outputs.shape, outputs, generator)
    leaf = outputs.clone().requires_grad_()
    targets = likelihood.sample(outputs, noise[0])
    (slope,) = torch.autograd.grad(likelihood.negative_log_likelihood(leaf, targets), leaf)
    assert_close(likelihood.score(outputs, targets), slope, rtol=1e-8, atol=1e-10)
    likelihood.check(outputs, targets)

    basis = torch.eye(event, dtype=outputs.dtype)[:, None].expand(event, terms, event)
    F = likelihood.fisher_product(outputs, basis).movedim(0, -1)  # (terms, event, event)
    root = torch.stack(list(likelihood.fisher_root_columns(outputs)), dim=-1)
    assert_close(root @ root.mT, F, rtol=1e-8, atol=1e-10)

    scores = torch.stack([likelihood.sampled_score(outputs, draw) for draw in noise])
    products = torch.einsum("dti,dtj->dtij", scores, scores)
    error = 5 * products.std(dim=0) / DRAWS**0.5
    assert bool(((products.mean(dim=0) - F).abs() <= error + 1e-10).all()), (
        f"E[score scoreᵀ] is not F_R:\n{products.mean(dim=0)}\ninstead of\n{F}"
    )
