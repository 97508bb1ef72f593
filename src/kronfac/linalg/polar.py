"""Polar factors of matrices, by five polynomials in place of a singular value decomposition.

For M = U Σ Vᵀ the polar factor is U Vᵀ. X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X applies an odd polynomial to the
singular values; the five of Polar Express (Amsel et al. 2025, arXiv 2505.16932) bring all between 10⁻³ and
1 close to 1. They need nothing but matrix products.
"""

import torch
from torch import Tensor

POLYNOMIALS = (
    (8.157, -22.48, 15.88),
    (4.043, -2.809, 0.5000),
    (3.892, -2.772, 0.5061),
    (3.286, -2.368, 0.4645),
    (2.347, -1.710, 0.4232),
)
"""(a, b, c) of each step, optimal for singular values of at least 10⁻³ [2505.16932]."""
MARGIN = 1.02
"""Rounding must not bring a singular value above 1, where the first polynomial grows."""
GRAM_PAYS = 1.5
"""Columns per row from which polynomials of X Xᵀ alone are fewer operations."""


def polar(M: Tensor) -> Tensor:
    """Return nearly U Vᵀ for every M = U Σ Vᵀ, (…, rows, columns); zeros for zeros.

    Singular values σ with σ / ‖M‖_F ≥ 10⁻³ become numbers between 0.8 and 1.2, smaller ones grow less.
    """
    wide = M.shape[-2] <= M.shape[-1]
    X = (M if wide else M.mT).reshape(-1, *sorted(M.shape[-2:]))
    X = normalized(X).div_(MARGIN)
    if X.shape[2] < GRAM_PAYS * X.shape[1]:
        for a, b, c in POLYNOMIALS:
            G = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(G, G, G, beta=b, alpha=c), X, beta=a)
    else:
        X = _product_of_polynomials(X @ X.mT) @ X
    return (X if wide else X.mT).reshape(M.shape)


def _product_of_polynomials(G: Tensor) -> Tensor:
    """Return P₅ ⋯ P₁ with P = a I + b G + c G², where G ← P G P is the next X Xᵀ."""
    Q = G
    for k, (a, b, c) in enumerate(POLYNOMIALS):
        P = torch.baddbmm(G, G, G, beta=b, alpha=c)
        P.diagonal(dim1=1, dim2=2).add_(a)
        Q = P @ Q if k else P
        G = P @ G @ P if k + 1 < len(POLYNOMIALS) else G
    return Q


def normalized(X: Tensor) -> Tensor:
    """Return X / ‖X‖_F for every matrix; zeros for zeros."""
    tiny = torch.finfo(X.dtype).tiny
    X = X / X.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=tiny)  # squares may overflow
    return X.div_(torch.linalg.matrix_norm(X, keepdim=True).clamp(min=tiny))


def polar_cost(rows: int, columns: int) -> int:
    """The floating-point operations of `polar` for one matrix."""
    short, long = sorted((rows, columns))
    if long < GRAM_PAYS * short:
        return len(POLYNOMIALS) * (4 * short**2 * long + 2 * short**3)
    return 4 * short**2 * long + (8 * len(POLYNOMIALS) - 6) * short**3
