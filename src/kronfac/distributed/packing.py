"""Symmetric matrices in half of their numbers, for the way between processes.

Of an (n, n) matrix with blocks of size h = n/2,

    M = [ P  Q ]        packed:  [ Q              ]   (h, h)
        [ Qᵀ R ]                 [ triu(R) above  ]   (h + 1, h): the upper triangle of R, and from the
                                 [ tril(P) below  ]   second row on the lower triangle of P

which is a rectangle of n (n + 1) / 2 numbers without an index for any of them. With n odd, a row and a
column of zeros are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Part:
    """A tensor that is a sum over the examples of all processes."""

    tensor: Tensor
    symmetric: bool = False
    """Whether its last two dimensions are those of a symmetric matrix."""

    @property
    def numbers(self) -> int:
        """How many numbers travel."""
        if not self._packs:
            return self.tensor.numel()
        n = self.tensor.shape[-1]
        half = (n + 1) // 2
        return self.tensor.numel() // (n * n) * half * (2 * half + 1)

    @property
    def _packs(self) -> bool:
        return self.symmetric and self.tensor.dim() > 1 and self.tensor.shape[-1] > 1

    def packed(self) -> Tensor:
        """What travels, flat."""
        return (pack(self.tensor) if self._packs else self.tensor).reshape(-1)

    def unpack(self, flat: Tensor) -> None:
        """Take over what has arrived, in place."""
        if self._packs:
            n = self.tensor.shape[-1]
            half = (n + 1) // 2
            shape = (*self.tensor.shape[:-2], 2 * half + 1, half)
            self.tensor.copy_(unpack(flat.reshape(shape), n))
        else:
            self.tensor.copy_(flat.reshape(self.tensor.shape))


def pack(M: Tensor) -> Tensor:
    """The rectangle (…, n + 1, n/2) of symmetric matrices (…, n, n); of n + 1 in the place of an odd n."""
    if M.shape[-1] % 2:
        M = pad(M, (0, 1, 0, 1))
    h = M.shape[-1] // 2
    P, Q, R = M[..., :h, :h], M[..., :h, h:], M[..., h:, h:]
    triangles = pad(R.triu(), (0, 0, 0, 1)) + pad(P.tril(), (0, 0, 1, 0))
    return torch.cat([Q, triangles], dim=-2)


def unpack(packed: Tensor, n: int) -> Tensor:
    """The symmetric matrices (…, n, n) of their rectangles."""
    h = packed.shape[-1]
    Q, triangles = packed[..., :h, :], packed[..., h:, :]
    R, P = triangles[..., :-1, :].triu(), triangles[..., 1:, :].tril()
    R, P = R + R.triu(1).mT, P + P.tril(-1).mT
    M = torch.cat([torch.cat([P, Q], dim=-1), torch.cat([Q.mT, R], dim=-1)], dim=-2)
    return M[..., :n, :n]


class Packed:
    """Tensors as they travel: those of one dtype and device one after another."""

    def __init__(self, parts: Sequence[Part]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[Part]] = {}
        for part in parts:
            kinds.setdefault((part.tensor.dtype, part.tensor.device), []).append(part)
        self._kinds = list(kinds.values())
        self.flats = [torch.cat([part.packed() for part in same]) for same in self._kinds]
        """What travels, in an order that all ranks have."""

    def unpack(self) -> None:
        """Take over what has arrived, in place."""
        for same, flat in zip(self._kinds, self.flats, strict=True):
            start = 0
            for part in same:
                part.unpack(flat[start : start + part.numbers])
                start += part.numbers
