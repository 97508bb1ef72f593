"""The average θ̄ of the iterates of late, and what it says of the length of momentum's memory.

In θ̄ the noise of the mini-batches cancels, but it lags behind. `LongMemory` has what follows from the one
weighing more than the other. Nothing here changes anything.
"""

import math

import torch

from kronfac.layers import Matrices
from kronfac.minibatch import draws_masks
from kronfac.point import ROUNDING, Network, Point, objective_change
from kronfac.state import State
from kronfac.step_size import StepRule


def updated_average(network: Network, step_size: StepRule, before: State) -> Matrices | None:
    """θ̄ with the current parameters in it; None where what M predicts is confirmed."""
    memory, experience = step_size.long_memory, before.experience
    if memory is None or experience.noise == 0:
        return None
    weight = memory.weight(experience)
    if before.average is None:
        return network.theta() if weight else None
    if not weight:
        return before.average
    return tuple(
        old.lerp(new, weight) for old, new in zip(before.average, network.theta(), strict=True)
    )


def memory_length(network: Network, step_size: StepRule, point: Point, before: State) -> float:
    """The memory from here on: another where θ̄ and θ are compared, on the rows of `point`."""
    memory, experience = step_size.long_memory, before.experience
    if memory is None or before.average is None or not memory.compares(experience):
        return before.memory
    if draws_masks(network.model):
        return before.memory  # with other masks every loss is another
    lag = tuple(a - b for a, b in zip(before.average, network.theta(), strict=True))
    dtype = lag[0].dtype
    change = objective_change(network, point, point.loss_seen(dtype), lag)
    rounding = ROUNDING * torch.finfo(dtype).eps * abs(float(point.loss))
    if not math.isfinite(change) or abs(change) <= rounding:
        return before.memory
    return memory.compared(experience, better=change < 0)
