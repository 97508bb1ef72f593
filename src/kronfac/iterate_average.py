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


def updated_average(
    network: Network, step_size: StepRule, before: State
) -> tuple[Matrices | None, int]:
    """θ̄ with the current parameters in it, and when it began; None where nobody will ask for it."""
    memory, experience = step_size.long_memory, before.experience
    if memory is None or experience.noise == 0 or draws_masks(network.model):
        return None, 0
    k, average, start = experience.iteration, before.average, before.average_start
    if not memory.averages(k):
        return average, start
    if average is None:
        return network.theta(), k
    weight = memory.weight(k, start)
    theta = network.theta()
    return tuple(old.lerp(new, weight) for old, new in zip(average, theta, strict=True)), start


def memory_length(network: Network, step_size: StepRule, point: Point, before: State) -> float:
    """The memory from here on: another where θ̄ and θ are compared, on the rows of `point`."""
    memory, experience = step_size.long_memory, before.experience
    if memory is None or experience.noise == 0:
        return math.inf  # what was learned of noise is of no use where there is none
    if before.average is None or not memory.compares(experience.iteration, before.average_start):
        return before.memory
    if draws_masks(network.model):
        return before.memory  # with other masks every loss is another
    loss = float(point.loss)
    if not math.isfinite(loss):
        return before.memory
    lag = tuple(a - b for a, b in zip(before.average, network.theta(), strict=True))
    dtype = lag[0].dtype
    change = objective_change(network, point, point.loss_seen(dtype), lag)
    if not math.isfinite(change) or abs(change) <= ROUNDING * torch.finfo(dtype).eps * abs(loss):
        return before.memory
    return memory.compared(experience, better=change < 0)
