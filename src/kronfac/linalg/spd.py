"""Cholesky factors, inverses and eigendecompositions of symmetric positive (semi-)definite matrices.

Each function checks its result, and tries again in float64 before it raises. The checks are needed: for the
rank-deficient factors of a first mini-batch, float32 `eigh` raises on some machines and returns NaN on
others, and `inv` of a singular matrix gives finite garbage. Cholesky's `info` detects NaN, infinity,
singular and indefinite matrices alike, so all inverses use it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.errors import MemoryExhaustedError, NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg.parallel import LARGE, each

# Multiples of the mean eigenvalue that are added to the diagonal, in float64, if Cholesky fails. The
# largest is the rounding error of float32 statistics: a matrix that needs more is wrong.
_JITTERS = (0.0, 1e-12, 1e-9, 1e-7, 1e-6)
Failure = NonFiniteError | NotPositiveDefiniteError | MemoryExhaustedError
LARGE_ON_GPU = 512
"""Matrices with at least this many rows keep a GPU busy alone; a batch would only take memory."""


def symmetrize(A: Tensor) -> Tensor:
    """(A + Aᵀ) / 2."""
    return (A + A.mT) / 2


def shift_diagonal(A: Tensor, shift: Tensor) -> Tensor:
    """A copy A + shift · I; a diagonal A may be given, and is returned, as a vector."""
    shifted = A.clone()
    (shifted if A.dim() == 1 else shifted.diagonal()).add_(shift)
    return shifted


def cholesky(A: Tensor, name: str = "matrix") -> Tensor:
    """Lower-triangular L with L Lᵀ = A, from the lower triangle of A.

    Tried in A's dtype, then in float64, then in float64 with a growing multiple of the mean
    eigenvalue on the diagonal.

    Raises:
        NonFiniteError: A holds NaN or infinity.
        NotPositiveDefiniteError: every try failed.
    """
    L: Tensor
    L, info = torch.linalg.cholesky_ex(A)
    if _succeeded(L, info):
        return L
    if not bool(A.isfinite().all()):
        raise NonFiniteError(f"{name} ({A.shape[0]} × {A.shape[1]}) holds NaN or infinity.")
    wide = A.double()
    scale = wide.diagonal().mean().abs()
    for jitter in _JITTERS:
        L, info = torch.linalg.cholesky_ex(
            wide + jitter * scale * torch.eye(len(A), dtype=wide.dtype, device=A.device)
        )
        if int(info) == 0:
            return L.to(A.dtype)
    smallest = float(torch.linalg.eigvalsh(wide)[0])
    raise NotPositiveDefiniteError(
        f"{name} ({A.shape[0]} × {A.shape[1]}) is not positive definite: its smallest eigenvalue is "
        f"{smallest:.3g}, its mean one {float(scale):.3g}. A larger damping makes it so."
    )


def _succeeded(L: Tensor, info: Tensor) -> bool:
    """Whether all of these Cholesky factors are valid."""
    good = (info == 0).all() & L.diagonal(dim1=-2, dim2=-1).isfinite().all()
    return bool(good)


def inverse_from_cholesky(L: Tensor) -> Tensor:
    """A⁻¹ from A = L Lᵀ, symmetric to the last bit."""
    # LAPACK fills one triangle and torch mirrors it: no rounding between the two.
    return torch.cholesky_inverse(L)


def inverse(A: Tensor, name: str = "matrix") -> Tensor:
    """A⁻¹ for a symmetric positive definite A, through its Cholesky factor."""
    return inverse_from_cholesky(cholesky(A, name))


def shifted_choleskys(
    matrices: Sequence[Tensor], shifts: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor]:
    """`cholesky` of each A + shift · I, in parallel."""
    return each(_shifted_cholesky, matrices, shifts, names, _rooms(matrices))


def shifted_inverse(A: Tensor, shift: Tensor, name: str = "matrix") -> Tensor:
    """The inverse of A + shift · I; a diagonal A may be given, and is returned, as a vector."""
    if A.dim() == 2:
        return inverse(shift_diagonal(A, shift), name)
    inverted = (A + shift).reciprocal_()
    if not bool((inverted.isfinite() & (inverted > 0)).all()):
        raise NotPositiveDefiniteError(f"{name} ({len(A)} × {len(A)}, diagonal) is not positive.")
    return inverted


def shifted_inverses(
    matrices: Sequence[Tensor], shifts: Sequence[Tensor], names: Sequence[str]
) -> list[Tensor | Failure]:
    """`shifted_inverse` of each matrix: small ones of equal shape in one call, others in parallel.

    In place of an inverse that does not exist is the error.
    """
    results: dict[int, Tensor | Failure] = {}
    for indices in _equal_shapes(matrices):
        stack = torch.stack([matrices[i] for i in indices])
        stack.diagonal(dim1=1, dim2=2).add_(torch.stack([shifts[i] for i in indices])[:, None])
        L, info = torch.linalg.cholesky_ex(stack)
        if _succeeded(L, info):  # else one by one below
            # Copies: a view into the stack has another alignment, and products with it round differently.
            # Then a run that is resumed from a file would not be the same bit for bit.
            inverses = [M.clone() for M in inverse_from_cholesky(L).unbind()]
            results |= zip(indices, inverses, strict=True)

    def one(A: Tensor, shift: Tensor, name: str, room: Tensor) -> Tensor | Failure:
        try:
            if A.dim() == 1:
                return shifted_inverse(A, shift, name)
            L = _shifted_cholesky(A, shift, name, room)
            return torch.cholesky_inverse(L, out=L)
        except (NonFiniteError, NotPositiveDefiniteError) as failure:
            return failure.with_traceback(None)  # the traceback would keep all tensors alive

    rest = [i for i in range(len(matrices)) if i not in results]
    left = [matrices[i] for i in rest]
    computed = each(one, left, [shifts[i] for i in rest], [names[i] for i in rest], _rooms(left))
    results |= zip(rest, computed, strict=True)
    return [results[i] for i in range(len(matrices))]


def _rooms(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Memory in which each matrix is shifted, factorised and inverted in place, in LAPACK's column order.

    The calling thread allocates it: the C library keeps freed memory for the thread that allocated it.
    """
    return [M.new_empty(M.shape).mT if M.dim() == 2 else M for M in matrices]


def _shifted_cholesky(A: Tensor, shift: Tensor, name: str, room: Tensor) -> Tensor:
    """`cholesky` of A + shift · I, in `room`."""
    room.copy_(A).diagonal().add_(shift)
    info = torch.empty((), dtype=torch.int32, device=A.device)
    torch.linalg.cholesky_ex(room, out=(room, info))
    if _succeeded(room, info):
        return room
    return cholesky(shift_diagonal(A, shift), name)


def _equal_shapes(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The indices of small matrices, in groups of two or more with the same shape, dtype and device."""
    groups: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for i, M in enumerate(matrices):
        if M.dim() == 2 and len(M) < (LARGE if M.device.type == "cpu" else LARGE_ON_GPU):
            groups.setdefault((len(M), M.dtype, M.device), []).append(i)
    return [indices for indices in groups.values() if len(indices) > 1]


def eigh(A: Tensor, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, negative ones set to 0) and eigenvectors of a positive semi-definite A.

    Accepted when finite; otherwise computed again in float64.

    Raises:
        NonFiniteError: A holds NaN or infinity, or float64 failed too.
    """
    for attempt in (A, A.double()):
        try:
            values, vectors = torch.linalg.eigh(attempt)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        # A NaN shows in the sum of its column; `eigh` fails by whole columns.
        if bool((values + vectors.sum(dim=0)).isfinite().all()):
            return values.clamp(min=0).to(A.dtype), vectors.to(A.dtype)
    raise NonFiniteError(
        f"{name} ({A.shape[0]} × {A.shape[1]}) has no finite eigendecomposition, in float64 either."
    )
