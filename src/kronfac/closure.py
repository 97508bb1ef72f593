"""The closure that `KFAC.closure` builds: one mini-batch, in chunks, with K-FAC owning the pass."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import _has_any_global_hook

from kronfac.errors import TargetError
from kronfac.inverses import ApproximateInverse
from kronfac.layers import Layer
from kronfac.minibatch import Batch, Call, draws_masks
from kronfac.objective import Objective
from kronfac.parameters import forget_gradients
from kronfac.perceptron import perceptron
from kronfac.precision import mixed
from kronfac.statistics import capture

Rows = tuple[Tensor, Tensor]
"""𝒢 (m, out) and 𝒜 (m, in+1) of one layer, with 𝒢ᵀ𝒜 = ∇_W h."""


@dataclass(frozen=True)
class ByHand:
    """What a pass by hand found; the gradients are in the parameters."""

    loss: Tensor
    batch: Batch
    """With the rows' way through the network, for all further passes to use."""
    rows: tuple[Rows, ...] | None
    """Where the low-rank route wants them [MG15 §8]."""


class MiniBatchClosure:
    """Loss and gradient of one mini-batch, by micro-batches of `chunk` rows.

    The gradients are those of one pass over all rows, up to rounding: with a mean loss every chunk
    is weighed by its share of the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        layers: Sequence[Layer],
        x: Tensor | tuple[Tensor, ...],
        y: Tensor,
        chunk: int | None,
        inverse: ApproximateInverse,
        weight_decay: float,
    ) -> None:
        self._args = x if isinstance(x, tuple) else (x,)
        for value in (*self._args, y):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"KFAC.closure takes tensors; got a {type(value).__module__}."
                    f"{type(value).__name__}. torch.as_tensor makes one."
                )
        if any(len(arg) != len(y) for arg in self._args):
            rows = ", ".join(str(len(arg)) for arg in self._args)
            raise TargetError(
                f"KFAC.closure needs as many targets as inputs; got {len(y)} targets for {rows} inputs."
            )
        if len(y) == 0:
            raise ValueError("KFAC.closure needs at least one case.")
        if chunk is not None and chunk < 1:
            raise ValueError(f"KFAC.closure's chunk is a number of rows, 1 or more; got {chunk}.")
        self._model = model
        self.objective = objective
        """Each `KFAC` has its own, by which it knows its closures."""
        self._layers = layers
        self._targets = y
        self._chunk = chunk or len(y)
        shapes = [layer.shape for layer in layers]
        self._keep_rows = bool(inverse.low_rank)
        self._keep_by_hand = inverse.wants_rows(shapes, len(y), weight_decay)
        self.rows: tuple[Rows, ...] | None = None
        """Set by a call, where the low-rank route wants it [MG15 §8]."""
        self.activations: dict[str, Tensor] | None = None
        """Set by a call in one chunk: what the layers returned, for K-FAC's own passes to reuse. In
        several chunks they would make memory that of the mini-batch; with dropout they have other masks, in
        mixed precision another dtype, and hooks may have changed them."""

    def __call__(self) -> Tensor:
        """The loss over the whole mini-batch; gradients are left in the parameters."""
        forget_gradients(self._layers)
        cases = len(self._targets)
        total = torch.zeros((), device=self._targets.device)
        kept: list[list[Rows]] = []
        for start in range(0, cases, self._chunk):
            part = slice(start, start + self._chunk)
            targets = self._targets[part]
            with ExitStack() as stack:
                again = not draws_masks(self._model) and not mixed(targets.device)
                # A hook may change what a layer returned, and would do so once more.
                hooked = any(layer.module._forward_hooks for layer in self._layers)
                reusable = self._chunk >= cases and again and not hooked
                wanted = self._keep_rows or reusable
                captured = stack.enter_context(capture(self._layers)) if wanted else None
                outputs = self._model(*(arg[part] for arg in self._args))
                loss = self.objective.module(outputs, targets)
            share = len(targets) / cases if self.objective.reduction == "mean" else 1.0
            grads = _remember_grads(captured.outputs()) if captured and self._keep_rows else []
            (loss * share).backward()
            total = total + loss.detach() * share
            if captured and reusable:
                self.activations = captured.activations()
            if captured and self._keep_rows:
                kept.append(
                    [
                        (
                            layer.output_grads(g).flatten(0, 1).to(layer.dtype),
                            layer.inputs(x).flatten(0, 1).to(layer.dtype),
                        )
                        for layer, g, x in zip(self._layers, grads, captured.inputs(), strict=True)
                    ]
                )
        if kept:
            self.rows = tuple(
                (torch.cat([g for g, _ in chunks]), torch.cat([a for _, a in chunks]))
                for chunks in zip(*kept, strict=True)
            )
        return total

    @torch.no_grad()
    def by_hand(self) -> ByHand | None:
        """The same without a graph or hooks; None if the model is no perceptron, or goes in chunks."""
        targets, cases = self._targets, len(self._targets)
        if self._chunk < cases or self._needs_graph():
            return None
        call = Call(self._args, {}, cases, torch.Size((cases,)))
        way = perceptron(self._model, self._layers, call)
        if way is None:
            return None
        outputs = way.outputs.detach().requires_grad_()
        self.objective.likelihood.check(outputs, targets)
        self.objective.refuse_ignored(self.objective.ignored(targets))
        with torch.enable_grad():
            loss = self.objective.module(outputs, targets)
        (slope,) = torch.autograd.grad(loss, outputs)
        forget_gradients(
            self._layers
        )  # first: old gradients and new ones need not be in memory together
        rows: list[Rows] = []
        for layer, a, g in way.backwards(slope):
            for parameter, grad in zip(layer.parameters(), layer.gradients(a, g), strict=True):
                parameter.grad = grad
            if self._keep_by_hand:
                rows.append((g, layer.inputs(a).flatten(0, 1)))
        call = replace(call, outputs=outputs.shape, targets=targets.detach(), way=way)
        return ByHand(loss.detach(), Batch((call,), loss.detach()), tuple(rows[::-1]) or None)

    def _needs_graph(self) -> bool:
        """Whether somebody is waiting for what only torch's own backward pass does."""
        parameters = [p for layer in self._layers for p in layer.parameters()]
        return (
            mixed(self._targets.device)
            or _has_any_global_hook()
            or any(t.requires_grad for t in (*self._args, self._targets))
            or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
        )


def _remember_grads(edges: Sequence[GradientEdge]) -> list[Any]:
    """A list that the gradients at `edges` will be in after the backward pass."""
    grads: list[Any] = [None] * len(edges)

    def keeper(index: int) -> Callable[[Sequence[Tensor]], None]:
        def hook(grad_outputs: Sequence[Tensor]) -> None:
            grads[index] = grad_outputs[edges[index].output_nr]

        return hook

    for i, edge in enumerate(edges):
        edge.node.register_prehook(keeper(i))
    return grads
