"""J v by forward-mode differentiation: one pass per direction, with dual numbers as parameters."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

from kronfac.network import Matrices, Network, Pass


@torch.no_grad()
def jvp(network: Network, part: Pass, directions: Sequence[Matrices]) -> list[Tensor]:
    """J v at the raw outputs of every loss call, (k, …).

    Raises:
        NotImplementedError, RuntimeError: an operation has no forward-mode derivative.
    """
    names = [name for unit in network.units for name in unit.names]
    found: list[list[Tensor]] = []
    for direction in directions:
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(p.detach(), tangent)
                for name, p, tangent in zip(
                    names, network.parameters, network.split(direction), strict=True
                )
            }
            outputs = part.run(partial(_call, network, duals))
            found.append([_tangent(z) for z in outputs])
    return [torch.stack(tangents) for tangents in zip(*found, strict=True)]


def _call(network: Network, duals: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(network.model, duals, args, kwargs)


def _tangent(z: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(z)
    return torch.zeros_like(primal) if tangent is None else tangent
