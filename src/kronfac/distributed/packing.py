"""Tensors as they are sent: concatenated, and symmetric matrices in half of their numbers.

Of an (n, n) matrix with blocks of size h = n/2,

    M = [ P  Q ]        packed:  [ Q              ]   (h, h)
        [ Qᵀ R ]                 [ triu(R) above  ]   (h + 1, h): the upper triangle of R, and from the
                                 [ tril(P) below  ]   second row on the lower triangle of P

which is a rectangle of n (n + 1) / 2 numbers without an index for any of them. With n odd, a row and a
column of zeros are added.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad


class Packed:
    """Tensors concatenated, in one flat tensor per dtype and device.

    Args:
        tensors: to be sent, or to be filled with what arrives.
        symmetric: whether each of them is a symmetric matrix, or a batch of them.
    """

    def __init__(self, tensors: Sequence[Tensor], symmetric: Sequence[bool]) -> None:
        kinds: dict[object, list[tuple[Tensor, bool]]] = defaultdict(list)
        for tensor, half in zip(tensors, symmetric, strict=True):
            packs = half and tensor.dim() > 1 and tensor.shape[-1] > 1
            kinds[tensor.dtype, tensor.device].append((tensor, packs))
        self._kinds = list(kinds.values())
        self.flats = [
            torch.cat([(pack(tensor) if packs else tensor).reshape(-1) for tensor, packs in same])
            for same in self._kinds
        ]
        """The numbers to be sent, in the same order on all ranks."""

    def unpack(self) -> None:
        """Copy the flat tensors back into the tensors."""
        for same, flat in zip(self._kinds, self.flats, strict=True):
            shapes = [_packed_shape(tensor) if packs else tensor.shape for tensor, packs in same]
            pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
            for (tensor, packs), shape, piece in zip(same, shapes, pieces, strict=True):
                found = piece.view(shape)
                tensor.copy_(unpack(found, tensor.shape[-1]) if packs else found)


def pack(M: Tensor) -> Tensor:
    """Return the rectangles (…, n + 1, n/2) of symmetric matrices (…, n, n), with n + 1 for an odd n."""
    if M.shape[-1] % 2:
        M = pad(M, (0, 1, 0, 1))
    h = M.shape[-1] // 2
    P, Q, R = M[..., :h, :h], M[..., :h, h:], M[..., h:, h:]
    triangles = pad(R.triu(), (0, 0, 0, 1)) + pad(P.tril(), (0, 0, 1, 0))
    return torch.cat([Q, triangles], dim=-2)


def unpack(packed: Tensor, n: int) -> Tensor:
    """Return the symmetric matrices (…, n, n) of their rectangles."""
    h = packed.shape[-1]
    Q, triangles = packed[..., :h, :], packed[..., h:, :]
    R, P = triangles[..., :-1, :].triu(), triangles[..., 1:, :].tril()
    R, P = R + R.triu(1).mT, P + P.tril(-1).mT
    M = torch.cat([torch.cat([P, Q], dim=-1), torch.cat([Q.mT, R], dim=-1)], dim=-2)
    return M[..., :n, :n]


def _packed_shape(M: Tensor) -> tuple[int, ...]:
    half = (M.shape[-1] + 1) // 2
    return (*M.shape[:-2], 2 * half + 1, half)
