"""What a training loop without a closure computed at θ: its record, and the gradients in the parameters.

optimizer.zero_grad()
loss = loss_fn(model(x), y)
loss.backward()
optimizer.step()
"""

import torch

from kronfac.closure_call import look_at
from kronfac.curvature import ApproximateInverse
from kronfac.errors import LoopError
from kronfac.evaluation import Evaluation, in_full_precision
from kronfac.grad_scaler import Scaling
from kronfac.groups import PerParameter
from kronfac.network import Network, StandingRecorder
from kronfac.network.changes import refuse_changes


def evaluate_loop(
    recorder: StandingRecorder,
    network: Network,
    *,
    weight_decay: PerParameter,
    inverse: ApproximateInverse,
    scaling: Scaling,
    who: str = "KFAC",
) -> Evaluation | None:
    """What the loop has computed since the last step; None if there is nothing to take a step from.

    Args:
        recorder: what the loop called.
        network: what is trained.
        weight_decay: η.
        inverse: how the curvature is inverted.
        scaling: what a GradScaler has multiplied loss and gradients by.
        who: takes the step, for errors.

    Raises:
        LoopError: a forward or a backward pass is missing, or its gradients were dropped.
        UnsupportedModelError: the model has been changed.
    """
    if network.shards is not None:
        network.shards.pull_gradients()
    refuse_changes(network)
    if recorder.watch.dropped():
        raise LoopError(
            f"{who}.step() needs the gradients that loss.backward() has left, but they were dropped or set "
            "to zero since: zero_grad() is called between backward() and step(). Call it before "
            "backward(), or after step()."
        )
    batch = recorder.batch()
    if batch is None:
        _explain(recorder, network, who)
        return None
    if scaling.overflow:
        return None  # GradScaler.update makes the scale smaller
    if scaling.scale is not None:
        scaling.unscale(network.given)
        if network.shards is not None:
            network.shards.pull_gradients()
        batch = batch.scaled(1 / scaling.scale)
    elif scaling.before is not None:
        batch = batch.scaled(1 / scaling.before)
    network, batch = look_at(network, batch, inverse)
    seen = batch.seen_loss
    loss = torch.zeros((), device=network.device) if seen is None else seen
    evaluation = Evaluation(network, None, loss, loss, weight_decay, batch, None, {})
    return in_full_precision(evaluation) if batch.mixed else evaluation


def refuse_call(closure: object) -> None:
    """Refuse a step that is asked for in a way that no step can be taken.

    Raises:
        TypeError: there is something that is no closure.
        LoopError: gradients are off for good.
    """
    if closure is not None and not callable(closure):
        raise TypeError(
            "KFAC.step() takes a closure that computes the loss, or nothing; got a "
            f"{type(closure).__name__}. Call loss.backward(), then step() with no argument."
        )
    if torch.is_inference_mode_enabled():
        raise LoopError(
            "KFAC.step() needs gradients, but it is called in torch.inference_mode(), in which there are "
            "none. Train outside of it; it is for evaluation."
        )


def _explain(recorder: StandingRecorder, network: Network, who: str) -> None:
    """Say what is missing; nothing is if all gradients are zero, as checkpointing tools set them.

    Raises:
        LoopError: there is no forward pass, or no backward pass.
    """
    grads = [p.grad for p in network.parameters]
    model = type(recorder.model).__name__
    if all(grad is None for grad in grads):
        if recorder.forwards:
            raise LoopError(
                f"{who}.step() needs gradients, but no backward pass has come to the outputs of the model "
                f"({model}) since it was called. Call loss.backward() before step()."
            )
        without = recorder.forwards_without_gradients
        seen = f"; it was called {without} times without gradients" if without else ""
        raise LoopError(
            f"{who}.step() needs a forward and a backward pass since the last step, but the model "
            f"({model}) has not been called{seen}. Call the model that {who} was given (a copy if the "
            "optimizer was copied or unpickled: optimizer.model), outside of torch.no_grad() and "
            "torch.inference_mode(), then loss.backward(), then step()."
        )
    if all(grad is None or not bool(grad.any()) for grad in grads):
        return
    raise LoopError(
        f"{who}.step() found gradients, but has not seen the call of the model ({model}) that they are "
        f"of since the last step. Call the model that {who} was given itself (if it is compiled, give "
        f"{who} the compiled one), and step() once after each backward(); for parts of a model, use a "
        "closure: step(closure)."
    )
