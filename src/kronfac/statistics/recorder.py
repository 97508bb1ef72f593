"""What the closure called the model and the loss with.

The closure does its own forward and backward passes; K-FAC's passes (statistics, Fisher products, ρ)
run over the same rows later. So hooks on the model and on the loss module remember the inputs and the
targets of each call, and nothing else. They are there only while the closure runs, which keeps copies
of the model free of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kronfac.errors import ClosureError, UnsupportedModelError
from kronfac.minibatch import Batch, Call
from kronfac.objective import Objective
from kronfac.precision import mixed

HALF = (torch.float16, torch.bfloat16)


class Recorder:
    """Remembers the calls of `model` and of the objective's loss module while it is entered."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model = model
        self.objective = objective
        self._calls: list[Call] = []
        self._last_output: Tensor | None = None
        self._version = 0
        self._loss_seen = True
        self._mixed = False
        self._versions: list[tuple[Tensor, int]] = []
        self._losses: list[Tensor] = []
        self._ignored: list[Tensor | None] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember calls inside this context, afresh."""
        self._calls, self._last_output, self._loss_seen, self._mixed = [], None, True, False
        self._losses, self._ignored, self._versions = [], [], []
        handles = [
            self.model.register_forward_hook(self._on_model, with_kwargs=True),
            self.objective.module.register_forward_hook(self._on_loss, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self) -> Batch:
        """The mini-batch that was recorded, which is then forgotten here.

        Raises:
            ClosureError: the model was not called, or its inputs were changed afterwards.
            TargetError: a target is the loss's `ignore_index`.
        """
        if not self._calls:
            raise ClosureError(
                f"The closure never called the model ({type(self.model).__name__}) with gradients "
                "enabled, so there is nothing to take a step from. Call the model that KFAC was "
                "given, in the closure."
            )
        versions, self._versions = self._versions, []
        if any(tensor._version != version for tensor, version in versions):
            raise ClosureError(
                "The closure changed inputs or targets in place after it had called the model with "
                "them, but KFAC goes through the same rows again. Use a new tensor for every call."
            )
        for ignored in self._ignored:
            self.objective.refuse_ignored(ignored)
        calls = tuple(self._calls)
        self._calls, self._last_output = [], None  # a step must not keep its mini-batch alive
        return Batch(calls, self._seen_loss(calls), self._mixed)

    def _seen_loss(self, calls: tuple[Call, ...]) -> Tensor | None:
        if not self._loss_seen or any(call.targets is None for call in calls):
            return None
        losses = torch.stack(self._losses)
        if self.objective.reduction == "sum":
            return losses.sum()
        # Micro-batches of different sizes: each mean counts by its rows.
        rows = torch.tensor([call.rows for call in calls], device=losses.device)
        return (losses * rows).sum() / rows.sum()

    def _on_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if not isinstance(outputs, Tensor) or outputs.dim() == 0:
            raise UnsupportedModelError(
                f"KFAC needs a model that returns one tensor with the cases as its first dimension; "
                f"{type(module).__name__} returned {_describe(outputs)}."
            )
        if not outputs.requires_grad:  # an evaluation on the side
            return
        self._mixed = self._mixed or mixed(outputs.device)
        self._calls.append(
            Call(self._in_full(args), self._in_full(kwargs), len(outputs), outputs.shape)
        )
        # Kept, so that its memory is not used again for what becomes of it; with its version.
        self._last_output, self._version = outputs.detach(), outputs._version
        self._watch((args, kwargs))

    def _on_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Tensor
    ) -> None:
        names = (
            ("outputs", "targets") if module is self.objective.likelihood else ("input", "target")
        )
        given = dict(zip(names, args, strict=False)) | kwargs
        outputs, targets = given[names[0]], given[names[1]]
        if not outputs.requires_grad:
            return
        call = self._calls[-1] if self._calls else None
        if call is None or call.targets is not None or not self._is_last_output(outputs):
            # The loss saw something else than what the model returned: a scaled or sliced output.
            self._loss_seen = False
            return
        # torch broadcasts with a warning at most; the likelihood refuses.
        self.objective.likelihood.check(outputs, targets)
        self._ignored.append(self.objective.ignored(targets))
        self._watch(targets)
        targets = self._in_full(targets).detach()
        if targets.shape == outputs.shape:
            targets = targets.reshape(call.rows, -1)
        self._calls[-1] = replace(call, targets=targets)
        self._losses.append(loss.detach())

    def _watch(self, values: Any) -> None:
        """Remember the versions of these tensors, to find out whether they were written to."""
        self._versions += [
            (leaf, leaf._version) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)
        ]

    def _in_full(self, values: Any) -> Any:
        """Tensors in half precision as the parameters are: without autocast the model takes no others."""
        if not self._mixed:
            return values
        dtype = next(p.dtype for p in self.model.parameters() if p.requires_grad)
        return pytree.tree_map(
            lambda leaf: leaf.to(dtype) if getattr(leaf, "dtype", None) in HALF else leaf, values
        )

    def _is_last_output(self, outputs: Tensor) -> bool:
        """Whether these are the numbers that the model returned, at most in another shape."""
        last = self._last_output
        if last is None or last._version != self._version:
            return False
        if self._mixed and outputs.dtype != last.dtype:
            # Who mixes precisions often writes loss(model(x).float(), y).
            return torch.equal(outputs.flatten(), last.flatten().to(outputs.dtype))
        return (
            outputs.data_ptr() == last.data_ptr()
            and outputs._version == self._version
            and outputs.numel() == last.numel()
            and (
                (outputs.is_contiguous() and last.is_contiguous())
                or (outputs.shape == last.shape and outputs.stride() == last.stride())
            )
        )


def _describe(value: Any) -> str:
    return (
        f"a tensor of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else (f"a {type(value).__name__}")
    )
