"""Symmetric matrices travel in half of their numbers."""

import pytest
import torch

from kronfac.distributed.packing import Packed, pack, unpack


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_packed_matrix_comes_back(n: int, batch: tuple[int, ...]) -> None:
    M = torch.randn(*batch, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    M = M + M.mT
    assert torch.equal(unpack(pack(M), n), M)


@pytest.mark.parametrize(("n", "numbers"), [(1, 1), (2, 3), (4, 10), (8, 36), (7, 36)])
def test_a_packed_matrix_has_half_of_the_numbers(n: int, numbers: int) -> None:
    (flat,) = Packed([torch.eye(n)], [True]).flats
    assert flat.numel() == numbers


def test_tensors_are_sent_together() -> None:
    sent = [torch.full((2, 3), 2.0), torch.eye(5)]
    received = [torch.zeros(2, 3), torch.zeros(5, 5)]
    packed, arriving = (Packed(tensors, [False, True]) for tensors in (sent, received))
    for flat, arrived in zip(packed.flats, arriving.flats, strict=True):
        arrived.copy_(flat)
    arriving.unpack()
    for one, other in zip(sent, received, strict=True):
        assert torch.equal(one, other)
