"""From what was recorded to passes: loss calls with the steps that their outputs were computed by."""

from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from kronfac.network.program import LossCall, ModelCall, Operation, Pass, Ref
from kronfac.objective import Objective

Step = ModelCall | Operation


def group(steps: Sequence[Step], losses: Sequence[LossCall]) -> tuple[Pass, ...]:
    """One pass for every set of loss calls that share a call of the model."""
    producers = {i: n for n, step in enumerate(steps) for i in _outputs(step)}
    passes: list[tuple[set[int], list[LossCall]]] = []
    for loss in losses:
        needed, together = _needed(steps, loss.input, producers), [loss]
        for other in [p for p in passes if p[0] & needed]:
            passes.remove(other)
            needed, together = needed | other[0], other[1] + together
        passes.append((needed, together))
    return tuple(
        Pass(tuple(steps[n] for n in sorted(needed)), tuple(together))
        for needed, together in passes
    )


def declare(
    steps: Sequence[Step], shapes: dict[int, torch.Size], objective: Objective
) -> tuple[Pass, ...]:
    """Passes without a loss call that was seen: the loss module's curvature at the model's outputs."""
    passes = []
    for call in steps:
        if isinstance(call, ModelCall):
            # A number is no prediction: models that compute their own loss return it first.
            predictions = [i for i in call.outputs if len(shapes[i])] or call.outputs
            terms = objective.declare(shapes[predictions[0]])
            passes.append(Pass((call,), (LossCall(predictions[0], terms),)))
    if not objective.mean:
        return tuple(passes)
    # Each call is a micro-batch of the same objective.
    total = sum(part.examples for part in passes)
    return tuple(
        Pass(part.steps, (part.losses[0].scaled(part.examples / total),)) for part in passes
    )


def _needed(steps: Sequence[Step], index: int, producers: dict[int, int]) -> set[int]:
    """The steps that a tensor is computed by."""
    needed: set[int] = set()
    wanted = [index]
    while wanted:
        number = producers[wanted.pop()]
        if number in needed:
            continue
        needed.add(number)
        step = steps[number]
        if isinstance(step, Operation):
            leaves = pytree.tree_leaves((step.args, step.kwargs))
            wanted += [leaf.index for leaf in leaves if isinstance(leaf, Ref)]
    return needed


def _outputs(step: Step) -> tuple[int, ...]:
    return step.outputs + (step.losses if isinstance(step, ModelCall) else ())
