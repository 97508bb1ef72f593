"""J v by forward-mode differentiation: one pass per direction, with dual numbers as parameters.

The parameters themselves become dual numbers, in place and while a pass lasts: so it holds for whatever the
model's code, or the closure's, does with them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kronfac.network import Matrices, Network, Pass
from kronfac.network.plain import PlainKernels
from kronfac.network.side_effects import unseen_writes


@torch.no_grad()
def jvp(network: Network, part: Pass, directions: Sequence[Matrices]) -> list[Tensor]:
    """J v at the raw outputs of every loss call, (k, …).

    Raises:
        NotImplementedError, RuntimeError: an operation has no forward-mode derivative.
    """
    parameters = network.parameters
    found: list[list[Tensor]] = []
    for direction in directions:
        # At its end all tangents are gone, also if the pass fails.
        with forward_ad.dual_level():
            with unseen_writes(parameters):
                for p, tangent in zip(parameters, network.split(direction), strict=True):
                    p.copy_(forward_ad.make_dual(p.detach().clone(), tangent))
            with PlainKernels():
                outputs = part.run(network.model)
            found.append([_tangent(z) for z in outputs])
    return [torch.stack(tangents) for tangents in zip(*found, strict=True)]


def _tangent(z: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(z)
    return torch.zeros_like(primal) if tangent is None else tangent
