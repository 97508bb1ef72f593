"""Call a closure, or take the passes of a loop since the last step, and make an `Evaluation` of them."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.curvature import ApproximateInverse
from kronfac.distributed import OwnPart, Portion, World, fingerprint, gather_parts
from kronfac.groups import PerParameter
from kronfac.linearize.by_hand import pass_by_hand
from kronfac.model import Network, RandomState, refuse_changes
from kronfac.model.side_effects import Context
from kronfac.record import Batch, MiniBatchClosure, Recorder, record
from kronfac.record.discovery import chain_network, discover
from kronfac.record.examples import check_examples
from kronfac.step.evaluation import Evaluation, as_loss, like

SAME_DIVISOR = 1e-6
"""Relative difference up to which the parts of a rank's loss are one mean."""
UNSCALED_BY = "_unscaled_by"
"""An attribute that integrations set for the time of a step: the scale that they divided gradients by."""


@dataclass(frozen=True)
class Scaling:
    """How `torch.amp.GradScaler` has scaled the gradients for an optimizer that unscales them itself.

    It sets `found_inf` and `grad_scale` for the time of a step; `grad_scale` is None if `unscale_` was
    called before.
    """

    active: bool = False
    """Whether a GradScaler takes the step."""
    overflow: bool = False
    """Whether it has found gradients that are not finite."""
    scale: float | None = None
    """The factor that is still in the gradients; None if there is none."""
    before: float | None = None
    """The factor that an integration has removed and noted in `UNSCALED_BY`."""

    @property
    def unscaled(self) -> bool:
        """Whether gradients were scaled by an unknown factor, and no longer are."""
        return self.active and self.scale is None and self.before is None

    @classmethod
    def of(cls, optimizer: object) -> "Scaling":
        """Read the attributes that a GradScaler sets on an optimizer."""
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        if found is None:
            return cls()
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        before: float | None = getattr(optimizer, UNSCALED_BY, None)
        return cls(True, float(found) > 0, None if scale is None else float(scale), before)

    def unscale(self, parameters: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.scale is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(self.scale)


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
        callers: the context that the closure is called in, see `model/side_effects.py`.

    Raises:
        ClosureError: the closure did not do what a step needs, such as a backward pass.
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
            network, batch = look_at(network, found.batch, inverse)
            return Evaluation(
                network,
                found.loss,
                found.loss,
                found.loss,
                weight_decay,
                batch,
                call,
                random,
                matrices=None if weight_decay else found.gradient,
                factors=found.factors,
            )
    # Only gradients of this closure count, even if it does not drop earlier ones.
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
    network, batch = look_at(network, batch, inverse)
    loss = as_loss(returned, network.device)
    evaluation = Evaluation(
        network, returned, loss, loss, weight_decay, batch, call, random, buffers=buffers
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
) -> Evaluation | None:
    """The passes of a loop since the last step, and the gradients in the parameters.

    None if there is nothing to take a step from: all gradients are zero, or a GradScaler has found one that
    is not finite. `who` and `needs_loss` are arguments of `Recorder.batch`.

    Raises:
        LoopError: see `Recorder.batch`.
        UnsupportedModelError: the model has been changed.
    """
    refuse_changes(network)
    batch = recorder.batch(who, needs_loss)
    if batch is None or scaling.overflow:
        return None  # GradScaler.update makes the scale smaller
    if scaling.scale is not None:
        scaling.unscale(network.parameters)
        batch = batch.scaled(1 / scaling.scale)
    elif scaling.before is not None:
        batch = batch.scaled(1 / scaling.before)
    network, batch = look_at(network, batch, inverse)
    recorded = batch.recorded_loss
    loss = torch.zeros((), device=network.device) if recorded is None else recorded
    evaluation = Evaluation(network, None, loss, loss, weight_decay, batch, None)
    return in_full_precision(evaluation) if batch.mixed else evaluation


def look_at(network: Network, batch: Batch, inverse: ApproximateInverse) -> tuple[Network, Batch]:
    """The network with the blocks and the chain that the batch shows; the batch with its examples found."""
    if not batch.traced:
        batch = check_examples(network, batch)
        if not network.discovered:
            with network.buffers.preserved():
                network = discover(network, batch.passes[0])
    if inverse.couples and not network.links:
        with network.buffers.preserved():
            network = chain_network(network, batch.passes[0])
    return network, batch


def in_full_precision(evaluation: Evaluation) -> Evaluation:
    """Replace the loss of a closure in half precision by that of K-FAC's own passes, if the loss was seen.

    In half precision the change of the loss by a step would be rounding error. The difference between the
    two losses counts as noise when the step is validated.
    """
    if not evaluation.loss_seen:
        return evaluation
    passes = []
    for part in evaluation.batch.passes:
        with evaluation.network.buffers.preserved():
            outputs = part.run(evaluation.network.model)
        losses = tuple(
            replace(loss, value=loss.evaluate(z))
            for loss, z in zip(part.losses, outputs, strict=True)
        )
        passes.append(replace(part, losses=losses))
    batch = replace(evaluation.batch, passes=tuple(passes))
    loss, portion = batch.recorded_loss, evaluation.portion
    assert loss is not None
    if portion.world.size > 1:
        total = portion.world.total([float(loss)], "loss")[0]
        loss, portion = like(loss, total), replace(portion, recorded_loss=total)
    return replace(evaluation, loss=loss, batch=batch, portion=portion)


def join_ranks(
    world: World,
    found: Evaluation | None,
    *,
    iteration: int,
    averaged: bool | None,
    sums: bool = True,
) -> tuple[Evaluation | None, bool | None]:
    """Join the ranks' evaluations of their own examples.

    Args:
        world: the ranks.
        found: this rank's own evaluation.
        iteration: of the step; in the first, the ranks have to have the same parameters.
        averaged: whether something averages gradients over the ranks, as DistributedDataParallel does; None
            to find out.
        sums: whether gradients are wanted; the same on all ranks.

    Returns:
        The evaluation on all ranks' examples, None if a rank has nothing to take a step from; and whether
        gradients are averaged, if that is known now.

    Raises:
        RankError: another rank has failed, or trains another network or from other parameters.
    """
    if world.size == 1:
        return found, averaged
    own = OwnPart(0.0) if found is None else _own_part(found, iteration, averaged)
    portion = gather_parts(world, own, averaged)
    if found is None or portion is None:
        return None, averaged
    gradients = None
    if sums and (found.batch.traced or not portion.averaged):
        # Nothing averages the gradients of K-FAC's own backward pass.
        gradients = _sum_gradients(found, portion)
    joined = replace(
        found,
        batch=found.batch.scaled(portion.share),
        returned_loss=like(found.returned_loss, portion.returned_loss),
        loss=like(found.loss, portion.loss),
        matrices=None,  # of this rank's examples alone, like the factors
        factors=None,
        portion=portion,
        gradients=gradients,
    )
    return joined, portion.averaged


def _own_part(evaluation: Evaluation, iteration: int, averaged: bool | None) -> OwnPart:
    batch, network = evaluation.batch, evaluation.network
    seen = batch.recorded_loss
    divisors = [terms.divisor for part in batch.passes for terms in part.terms]
    same = all(math.isclose(d, divisors[0], rel_tol=SAME_DIVISOR) for d in divisors)
    units = (f"{u.names} {u.block.describe(*u.shape)} {u.shape}" for u in network.units)
    description = "\n".join([*units, str(list(network.links))])
    gradients = [p.grad for p in network.parameters if p.grad is not None]
    return OwnPart(
        found=1.0,
        examples=float(batch.examples),
        terms=float(batch.most_terms),
        seen=float(seen is not None),
        summed=float(batch.summed),
        divisor=divisors[0] if same else math.nan,
        returned_loss=float(evaluation.returned_loss),
        loss=float(evaluation.loss),
        recorded_loss=0.0 if seen is None else float(seen),
        weight=evaluation.numbers.resolution / torch.finfo(network.dtype).eps,
        network=float(zlib.crc32(description.encode())),
        parameters=fingerprint(network.parameters) if iteration == 1 else 0.0,
        gradient=fingerprint(gradients) if averaged is None else 0.0,
    )


def _sum_gradients(found: Evaluation, portion: Portion) -> Mapping[nn.Parameter, Tensor]:
    """Σ_r share_r ∇h_r over the ranks r, for all parameters in which any rank has a gradient."""
    parameters = found.network.parameters
    own = [found.gradient_of(p) for p in parameters]
    # With the same layout in memory on all ranks: products of other layouts differ by rounding.
    sums = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in parameters]
    for total, grad in zip(sums, own, strict=True):
        if grad is not None:
            torch.mul(grad, portion.share, out=total)
    ranks = portion.world.sum(sums, "gradient", numbers=[float(g is not None) for g in own])
    return {p: total for p, total, n in zip(parameters, sums, ranks, strict=True) if n}
