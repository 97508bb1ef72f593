"""Call a closure, or take the passes of a loop since the last step, and make an `Evaluation` of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kronfac.curvature import ApproximateInverse
from kronfac.groups import PerParameter
from kronfac.linearize.by_hand import pass_by_hand
from kronfac.model import Network, RandomState, refuse_changes
from kronfac.model.own_pass import Context
from kronfac.record import Batch, MiniBatchClosure, Recorder, record
from kronfac.record.chain import chain_network
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples
from kronfac.step.evaluation import Evaluation, as_loss, in_full_precision
from kronfac.step.grad_scaler import Scaling


def evaluate_closure(
    closure: Callable[[], Any],
    model: nn.Module,
    network: Network,
    *,
    weight_decay: PerParameter,
    inverse: ApproximateInverse,
    callers: Context,
) -> Evaluation:
    """Call the closure, and record what it does.

    Args:
        closure: the user's, or of `KFAC.closure`.
        model: the module that it calls; `network.model` is the module inside it, if it is compiled.
        network: the units that are trained.
        weight_decay: η.
        inverse: how the curvature is inverted.
        callers: the context that the closure is called in, see `model/own_pass.py`.

    Raises:
        ClosureError: it did not do what a step needs.
        UnsupportedModelError: the model has been changed.
    """
    refuse_changes(network)
    random = RandomState.current(network.device)

    def call() -> Any:
        with callers():
            return closure()

    # Closures of another optimizer may be of another model: they are recorded.
    if isinstance(closure, MiniBatchClosure) and closure.objective is network.objective:
        shapes = [unit.shape for unit in network.units]
        wanted = inverse.wants_factors(shapes, len(closure.targets), weight_decay.largest)
        with callers():
            found = pass_by_hand(closure, network, wanted)
        if found is not None:
            loss, batch, factors = found
            network, batch = _look_at(network, batch, inverse)
            return Evaluation(network, loss, loss, loss, weight_decay, batch, call, random, factors)
    # Only gradients of this closure count, also if it does not drop those before it.
    before = [(p, p.grad) for p in network.parameters]
    for p in network.parameters:
        p.grad = None
    kept = network.buffers.before_call("")
    with record(model, network.objective, network.buffers) as recording, torch.enable_grad():
        try:
            returned = call()
        except BaseException:
            for p, grad in before:
                p.grad = grad
            raise
    del before
    batch = recording.batch()
    buffers = network.buffers.written(kept)
    network, batch = _look_at(network, batch, inverse)
    loss = as_loss(returned, network.device)
    evaluation = Evaluation(
        network, returned, loss, loss, weight_decay, batch, call, random, None, buffers
    )
    return in_full_precision(evaluation) if batch.mixed else evaluation


def evaluate_loop(
    recorder: Recorder,
    network: Network,
    *,
    weight_decay: PerParameter,
    inverse: ApproximateInverse,
    scaling: Scaling,
    who: str = "KFAC",
    needs_loss: bool = True,
    ended_by_closure: bool = False,
) -> Evaluation | None:
    """The passes of a loop since the last step, and the gradients in the parameters.

    None if there is nothing to take a step from: all gradients are zero, or a GradScaler has found one that
    is not finite. `who`, `needs_loss` and `ended_by_closure` are arguments of `Recorder.batch`.

    Raises:
        LoopError: see `Recorder.batch`.
        UnsupportedModelError: the model has been changed.
    """
    refuse_changes(network)
    batch = recorder.batch(who, needs_loss, ended_by_closure)
    if batch is None or scaling.overflow:
        return None  # GradScaler.update makes the scale smaller
    if scaling.scale is not None:
        scaling.unscale(network.parameters)
        batch = batch.scaled(1 / scaling.scale)
    elif scaling.before is not None:
        batch = batch.scaled(1 / scaling.before)
    network, batch = _look_at(network, batch, inverse)
    recorded = batch.recorded_loss
    loss = torch.zeros((), device=network.device) if recorded is None else recorded
    evaluation = Evaluation(network, None, loss, loss, weight_decay, batch, None)
    return in_full_precision(evaluation) if batch.mixed else evaluation


def _look_at(network: Network, batch: Batch, inverse: ApproximateInverse) -> tuple[Network, Batch]:
    """What a recorded mini-batch says about the network, and where its examples are."""
    if not any(call.trace for part in batch.passes for call in part.calls):
        batch = check_examples(network, batch)
        if not network.discovered:
            with network.buffers.preserved():
                network = discover(network, batch.passes[0])
    if inverse.couples and not network.links:
        with network.buffers.preserved():
            network = chain_network(network, batch.passes[0])
    return network, batch
