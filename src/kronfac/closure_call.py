"""One call of the closure, recorded, and what it says about the network.

A closure of the user's, its micro-batches and K-FAC's own closure all end in an `Evaluation`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from kronfac.closure import MiniBatchClosure
from kronfac.curvature import ApproximateInverse
from kronfac.evaluation import Evaluation, StaleGradients, as_loss, in_full_precision
from kronfac.groups import PerParameter
from kronfac.interrupts import Allowed
from kronfac.linalg import OuterProduct
from kronfac.network import Batch, Kept, Network, RandomState, record
from kronfac.network.chain import chain_network
from kronfac.network.changes import refuse_changes
from kronfac.network.discovery import discover
from kronfac.network.division import arrange
from kronfac.precision import Context


def evaluate(
    closure: Callable[[], Any],
    model: nn.Module,
    network: Network,
    *,
    weight_decay: PerParameter,
    inverse: ApproximateInverse,
    callers: Context,
) -> Evaluation:
    """Call the closure.

    Args:
        closure: of the user's, or of `KFAC.closure`.
        model: what it calls; `network.model` is what is inside, if that is compiled.
        network: what is trained.
        weight_decay: η.
        inverse: how the curvature is inverted.
        callers: the context that the closure was to be called in, see `precision.py`.

    Raises:
        ClosureError: it did not do what a step needs.
        UnsupportedModelError: the model has been changed.
    """
    refuse_changes(network)
    own = closure if isinstance(closure, MiniBatchClosure) else None
    if own and own.objective is not network.objective:
        own = None  # another optimizer's, perhaps of another model: the recorder will see

    def call() -> Any:
        with callers(), Allowed():
            return closure()

    shards = network.shards

    def call_again() -> Any:
        """The same at other parameters; gradients stay those of the first call."""
        with ExitStack() as stack:
            if shards is not None:
                stack.enter_context(shards.aside())
            return call()

    found, random = None, RandomState.current(network.device)
    if own:
        shapes = [unit.shape for unit in network.units]
        wanted = inverse.wants_factors(shapes, own.examples(), weight_decay.largest)
        with callers():
            found = own.by_hand(network, wanted)
    stale: StaleGradients = {}
    factors: Sequence[OuterProduct] | None = None
    buffers: Sequence[Kept] = ()
    if found:
        returned, batch, factors = found.loss, found.batch, found.factors
        if shards is not None:
            shards.drop_gradients()
    else:
        if shards is not None:
            shards.note_gradients()
        if not own:  # K-FAC's own closure leaves none; to hold on to them would only cost memory
            grads = [(p, p.grad) for p in network.parameters]
            stale = {p: (grad, grad._version) for p, grad in grads if grad is not None}
        versions = network.buffers.versions()
        kept = network.buffers.before_call("")
        with (
            record(model, network.objective, network.buffers) as recording,
            torch.enable_grad(),
        ):
            returned = call()
        if shards is not None:
            shards.pull_gradients()
        batch = recording.batch()
        network.buffers.note_writes(versions)
        buffers = network.buffers.written(kept)
    network, batch = look_at(network, batch, inverse)
    loss = as_loss(returned, network.device)
    evaluation = Evaluation(
        network,
        returned,
        loss,
        loss,
        weight_decay,
        batch,
        call_again,
        stale,
        random,
        factors,
        buffers,
    )
    return in_full_precision(evaluation) if batch.mixed else evaluation


def look_at(network: Network, batch: Batch, inverse: ApproximateInverse) -> tuple[Network, Batch]:
    """What a recorded mini-batch says about the network, and how its passes can be divided."""
    if not any(call.trace for part in batch.passes for call in part.calls):
        batch = arrange(network, batch)
        if not network.discovered:
            with network.buffers.preserved():
                network = discover(network, batch.passes[0])
    if inverse.couples and not network.links:
        with network.buffers.preserved():
            network = chain_network(network, batch.passes[0])
    return network, batch
