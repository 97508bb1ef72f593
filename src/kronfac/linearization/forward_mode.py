"""f and J v by forward-mode differentiation: one pass per direction, with dual numbers as parameters.

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


def jvp(network: Network, part: Pass, directions: Sequence[Matrices]) -> list[Tensor]:
    """J v alone."""
    return outputs_and_jvp(network, part, directions)[1]


@torch.no_grad()
def outputs_and_jvp(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, and J v there, (k, …): a pass computes both.

    Raises:
        NotImplementedError, RuntimeError: an operation has no forward-mode derivative.
    """
    parameters = network.parameters
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        # At its end all tangents are gone, also if the pass fails.
        with forward_ad.dual_level():
            with unseen_writes(parameters):
                for p, tangent in zip(parameters, network.split(direction), strict=True):
                    p.copy_(forward_ad.make_dual(p.detach().clone(), tangent))
            with PlainKernels():
                outputs = part.run(network.model)
            pairs = [forward_ad.unpack_dual(z) for z in outputs]
            values = [z.detach() for z, _ in pairs]
            found.append([torch.zeros_like(z) if Jv is None else Jv for z, Jv in pairs])
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]
