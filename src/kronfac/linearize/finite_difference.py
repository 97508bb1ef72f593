"""J v by central differences, (f(θ + εv) − f(θ − εv)) / 2ε: for any forward pass.

Both passes draw the same random numbers. The error is of the order of ε² by curvature and of the dtype's
precision over ε by rounding; the two balance where ε ‖v‖ is the cube root of the precision, times the size
of what v moves. That is less than ‖θ‖, which normalisation layers with weights of 1 dominate; and kinks
(ReLU) that lie between the two points cost in proportion to ε. A jump between them, where an example goes
to another expert, costs its height over ε, and is the rarer the smaller ε is: `base.py` takes a smaller
one where J v does not agree with the gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.model import Matrices, Network, dot
from kronfac.model.side_effects import unseen_writes
from kronfac.record import Pass

SHARE = 0.0625
"""Size of what v moves, in units of ‖θ‖: embeddings of size 0.02 stand beside scales of 1."""


@torch.no_grad()
def outputs_and_jvp(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, up to ε², and J v there, (k, …)."""
    theta = network.theta()
    size = float(dot(theta, theta)) ** 0.5 or 1.0
    precision: float = (
        SHARE * torch.finfo(network.dtype).eps ** (1 / 3) * network.learned.difference
    )
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        norm = float(dot(direction, direction)) ** 0.5
        epsilon = precision * size / norm if norm > 0 else 1.0
        with unseen_writes(network.parameters):
            with network.displaced(direction, epsilon):
                above = part.run(network.model)
            with network.displaced(direction, -epsilon):
                below = part.run(network.model)
        found.append([(a - b) / (2 * epsilon) for a, b in zip(above, below, strict=True)])
        values = [(a + b) / 2 for a, b in zip(above, below, strict=True)]
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]
