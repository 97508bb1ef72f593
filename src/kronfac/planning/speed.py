"""How fast this process computes, measured in a few products and inverses."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

SIZE = 512
"""Rows of the matrices: large enough for the speed of large ones on a CPU, and done in milliseconds."""
REPEATS = 3
"""The fastest counts: others have been disturbed."""


@torch.no_grad()
def measure_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Floating-point operations per second in products, and in inverses by Cholesky (n³).

    Raises:
        ValueError: on the `meta` device, which computes nothing.
    """
    if device.type == "meta":
        raise ValueError(
            "kronfac.plan can't measure the speed of a process on the meta device. Say it: "
            "world=World(64, flops=1e13)."
        )
    A = torch.eye(SIZE, dtype=dtype, device=device)
    products = 2 * SIZE**3 / _seconds(lambda: A @ A, device)
    inverses = SIZE**3 / _seconds(
        lambda: torch.cholesky_inverse(torch.linalg.cholesky_ex(A).L), device
    )
    return products, inverses


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    best = float("inf")
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-9)
