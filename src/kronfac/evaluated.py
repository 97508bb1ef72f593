"""A call of the user's closure: the loss on its mini-batch, and what the gradient is made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kronfac.closure import MiniBatchClosure, Rows
from kronfac.errors import ClosureError
from kronfac.inverses import ApproximateInverse
from kronfac.layers import refuse_changes
from kronfac.parameters import StaleGradients, as_loss, gradient, loss_at
from kronfac.point import Evaluation, Network, Point, in_full_precision
from kronfac.precision import Context
from kronfac.statistics import Recorder, chain_order


@dataclass(frozen=True)
class Evaluated:
    """What a closure did."""

    returned: Any
    network: Network
    """With its layers in the order of the chain, where that matters."""
    evaluation: Evaluation
    stale: StaleGradients
    rows: tuple[Rows, ...] | None

    def point(self) -> Point:
        """With the gradient, which takes memory that a judgement can do without."""
        return Point(
            returned=self.evaluation.returned,
            loss=self.evaluation.loss,
            weight_decay=self.evaluation.weight_decay,
            batch=self.evaluation.batch,
            reevaluate=self.evaluation.reevaluate,
            gradient=gradient(self.network.layers, self.evaluation.weight_decay, self.stale),
            rows=self.rows,
        )


def evaluate(
    closure: Callable[[], Any],
    recorder: Recorder,
    network: Network,
    *,
    weight_decay: float,
    inverse: ApproximateInverse,
    ordered: bool,
    callers: Context,
) -> Evaluated:
    """Call the closure; `ordered` says whether the network's layers are in the order of the chain.

    `callers` is the context that the closure was to be called in, see `precision.py`.

    Raises:
        ClosureError: it did not do what a step needs.
        UnsupportedModelError: the model has been changed, see `refuse_changes`.
    """
    parameters = [p for layer in network.layers for p in layer.parameters()]
    refuse_changes(network.model, network.layers)
    own = closure if isinstance(closure, MiniBatchClosure) else None
    if own and own.objective is not network.objective:
        own = None  # another optimizer's, perhaps of another model: the recorder will see

    def call() -> Any:
        with callers():
            return closure()

    with callers():
        by_hand = own.by_hand() if own else None
    stale: StaleGradients = {}
    if by_hand:
        returned, batch, rows = by_hand.loss, by_hand.batch, by_hand.rows
        if inverse.low_rank is None and weight_decay:
            rows = None  # the weight decay is another than when the closure was made
    else:
        if not own:  # K-FAC's own closure leaves none; to hold on to them would only cost memory
            stale = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}
        with recorder.recording(), torch.enable_grad():
            returned = call()
        batch = recorder.take()
        rows = None
        if own:
            rows = own.rows
            batch = batch.with_activations(own.activations)
            own.activations = None
    if not ordered:
        layers = chain_order(network.model, network.layers, batch.calls[0])
        network = replace(network, layers=layers)
    if inverse.low_rank and rows is None:
        raise ClosureError(
            f"{inverse!r} takes the gradient apart, so the pass has to be KFAC's own: use "
            "optimizer.step(optimizer.closure(x, y))."
        )
    loss = as_loss(returned, parameters[0].device)
    evaluation = Evaluation(
        returned=loss,
        loss=loss,
        weight_decay=weight_decay,
        batch=batch,
        reevaluate=lambda delta: loss_at(call, network.layers, delta),
    )
    if batch.mixed:
        evaluation = in_full_precision(network, evaluation)
    return Evaluated(returned, network, evaluation, stale, rows)
