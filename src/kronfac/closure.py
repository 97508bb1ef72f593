"""The closure that `KFAC.closure` builds: one mini-batch, in chunks, with K-FAC owning the pass."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
)

from kronfac.errors import TargetError
from kronfac.linalg import OuterProduct
from kronfac.linearization.by_hand import augmented, gradients, trace_call
from kronfac.network import Batch, LossCall, ModelCall, Network, Pass, RandomState, Ref, hooked
from kronfac.network.global_hooks import others_wait
from kronfac.objective import Objective
from kronfac.precision import mixed


@dataclass(frozen=True)
class FoundByHand:
    """What a pass by hand found; the gradients are in the parameters."""

    loss: Tensor
    batch: Batch
    """With the examples' trace through the network, for all further passes to use."""
    factors: tuple[OuterProduct, ...] | None
    """The gradient as outer products, if they are wanted [MG15 §8]."""


class MiniBatchClosure:
    """Loss and gradient of one mini-batch, by micro-batches of `chunk` examples.

    The gradients are those of one pass over all examples, up to rounding: with a mean loss every chunk
    is weighed by its share of the examples, or of what the mean divides by if targets are ignored or
    classes are weighted.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        x: Tensor | tuple[Tensor, ...],
        y: Tensor,
        chunk: int | None,
    ) -> None:
        self._args = x if isinstance(x, tuple) else (x,)
        for value in (*self._args, y):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"KFAC.closure takes tensors; got a {type(value).__module__}."
                    f"{type(value).__name__}. torch.as_tensor makes one."
                )
        if any(len(arg) != len(y) for arg in self._args):
            lengths = ", ".join(str(len(arg)) for arg in self._args)
            raise TargetError(
                f"KFAC.closure needs as many targets as inputs; got {len(y)} targets for {lengths} inputs."
            )
        if len(y) == 0:
            raise ValueError(
                "KFAC.closure needs at least one example; got none. Leave out empty mini-batches."
            )
        if chunk is not None and chunk < 1:
            raise ValueError(
                f"KFAC.closure's chunk is a number of examples, 1 or more; got {chunk}."
            )
        self._model = model
        self.objective = objective
        """Each `KFAC` has its own, by which it knows its closures."""
        self._targets = y
        self._chunk = chunk or len(y)

    def __call__(self) -> Tensor:
        """The loss over the whole mini-batch; gradients are left in the parameters."""
        for p in self._model.parameters():
            p.grad = None
        examples = len(self._targets)
        total = torch.zeros((), device=self._targets.device)
        weighed = self.objective.mean and self._chunk < examples
        whole = self.objective.denominator(self._targets) if weighed else 1.0
        for start in range(0, examples, self._chunk):
            part = slice(start, start + self._chunk)
            targets = self._targets[part]
            share = self.objective.denominator(targets) / whole if weighed and whole else 1.0
            if share == 0:
                continue  # all of its targets are ignored
            loss = self.objective.loss(self._model(*(arg[part] for arg in self._args)), targets)
            (loss * share).backward()
            total = total + loss.detach() * share
        return total

    @torch.no_grad()
    def by_hand(self, network: Network, keep_factors: bool) -> FoundByHand | None:
        """The same without a graph or hooks; None if the model is no perceptron, or goes in chunks."""
        targets, examples = self._targets, len(self._targets)
        if self._chunk < examples or self._needs_graph(network):
            return None
        call = ModelCall(self._args, {}, outputs=(0,))
        random = RandomState.current(network.device)
        trace = trace_call(network, call)
        if trace is None:
            return None
        call = replace(call, trace=trace, random=random if trace.random else None)
        outputs = trace.outputs.detach().requires_grad_()
        terms = self.objective.read(outputs, targets)
        with torch.enable_grad():
            loss = self.objective.module(outputs, targets)
        (slope,) = torch.autograd.grad(loss, outputs)
        # First: old gradients and new ones need not be in memory together.
        for p in network.parameters:
            p.grad = None
        factors: list[OuterProduct] = []
        for unit, a, g in trace.backwards(slope):
            for parameter, grad in zip(unit.parameters, gradients(unit, a, g), strict=True):
                parameter.grad = grad
            if keep_factors:
                factors.append(OuterProduct(g, augmented(unit, a)))
        loss_call = LossCall(
            0, terms, loss.detach(), self.objective.module, (Ref(0), targets.detach()), {}
        )
        passed = Pass((call,), (loss_call,))
        return FoundByHand(loss.detach(), Batch((passed,)), tuple(factors[::-1]) or None)

    def examples(self) -> int:
        """How many examples the mini-batch has."""
        return len(self._targets)

    def _needs_graph(self, network: Network) -> bool:
        """Whether somebody is waiting for what only torch's own backward pass does."""
        return (
            self.objective.of_pairs
            or mixed(self._targets.device)
            or others_wait()
            or bool(_global_backward_hooks or _global_backward_pre_hooks)
            or any(t.requires_grad for t in (*self._args, self._targets))
            or hooked(network.parameters)
        )
