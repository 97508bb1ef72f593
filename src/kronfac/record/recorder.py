"""The calls of the model and the loss in a training loop without a closure, since the last step.

A record is attached to its graph: to the nodes of the model's outputs, then to a hook of the loss. So a
forward pass that is never differentiated leaves nothing behind. A backward pass that arrives at the loss
hands the record to the recorder, which keeps it until the step, or until gradients are dropped. No graph
and no activations are kept, only the arguments of the model and the loss.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import TensorWeakRef

from kronfac.errors import LoopError
from kronfac.model.nested import tensors_of
from kronfac.model.side_effects import Buffers, is_compiled, register_hooks
from kronfac.objective import Objective
from kronfac.record.batch import Batch, ModelCall
from kronfac.record.mode import Recording
from kronfac.record.tape import Record, SeenLoss, assemble, new_key


@dataclass
class Since:
    """What has happened since the last step."""

    losses: dict[SeenLoss, Tensor] = field(default_factory=dict)
    """Loss calls that backward passes have reached, with the gradients that arrived at them."""
    outputs: dict[Record, None] = field(default_factory=dict)
    """Calls of the model that backward passes have reached, and whose loss was not recorded."""
    backward: int | None = None
    """The number that torch gave the last backward pass."""
    added_to_old: bool = False
    """Whether the first backward pass has added to the gradients of the last step."""
    forwards: int = 0
    """Calls of the model with gradients enabled."""
    forwards_without_gradients: int = 0
    detached: int = 0
    """Calls of the loss with tensors that have no graph."""
    unread: str = ""
    """The operation that ended the way from a loss call back to the model; none if no call ended there."""

    def copy(self) -> "Since":
        """A copy that later passes do not change."""
        return replace(self, losses=dict(self.losses), outputs=dict(self.outputs))


class Recorder:
    """Records the calls of the model and the loss, for a step without a closure."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
    ) -> None:
        self.model = model
        self.objective = objective
        self.since = Since()
        self._parameters = parameters
        self._buffers = buffers
        self._key = new_key()
        self._indices: Iterator[int] = count()
        self._running = _Running()
        self._paused = 0
        self._stepped: list[tuple[TensorWeakRef, int]] = []
        """The gradients that the last step used, with their versions."""
        self.handles = [
            *register_hooks(model, self._before_model, self._after_model),
            *register_hooks(objective.module, self._before_loss, self._after_loss),
        ]

    # ---------------------------------------------------------------------------------- what is kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside: for K-FAC's own passes, and for closures, which have their own record."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def records(self) -> tuple[SeenLoss | Record, ...]:
        """Losses and outputs that backward passes have reached since the last step, unless zeroed since."""
        return (*self.since.losses, *self.since.outputs)

    def forget(self) -> None:
        """Drop what was recorded: its gradients were dropped."""
        self.since.losses, self.since.outputs = {}, {}

    def snapshot(self) -> Callable[[], None]:
        """A function that restores the record as it is now, for a step that fails."""
        since, running, paused = self.since.copy(), list(self._running.calls), self._paused

        def restore() -> None:
            self.since = since.copy()
            self._paused = (
                paused  # an interrupt may come between a pause and the `try` that ends it
            )
            # torch calls no hook after a call that a KeyboardInterrupt has ended.
            self._running.calls[:] = running

        return restore

    def step(self) -> None:
        """Begin the record of the next step."""
        self.since = Since()
        grads = [p.grad for p in self._parameters if p.grad is not None]
        self._stepped = [(TensorWeakRef(grad), grad._version) for grad in grads]

    def batch(self, who: str = "KFAC", needs_loss: bool = True) -> Batch | None:
        """The mini-batch since the last step; None if all gradients are zero, as checkpoint tools set them.

        Args:
            who: the optimizer, for errors.
            needs_loss: whether the loss has to be recorded, and not only what the model computed.

        Raises:
            LoopError: a pass is missing, its gradients were dropped, its inputs or targets were changed
                since, or its loss was not recorded.
        """
        grads = [p.grad for p in self._parameters if p.grad is not None]
        zeros = not self.records and not any(bool(grad.any()) for grad in grads)
        if self.since.backward is not None and (zeros or not grads):
            raise LoopError(zeroed(who))
        changed = LoopError(
            "Inputs or targets were changed in place after the model or the loss was called with them, but "
            f"{who}.step() runs the model on the same examples again. Use a new tensor for every call, or "
            "call step() before you change them."
        )
        batch = assemble(self.since.losses, list(self.since.outputs), self.objective, changed)
        if batch is None and not (grads and zeros):
            raise self._missing_pass(who, bool(grads))
        if batch is not None and needs_loss and batch.recorded_loss is None:
            raise self._missing_loss()
        return batch

    def _missing_pass(self, who: str, gradients: bool) -> LoopError:
        """The error of a step without a recorded call that a backward pass has reached."""
        model, since = type(self.model).__name__, self.since
        if gradients:
            return LoopError(
                f"{who}.step() found gradients, but it has not seen the call of the model ({model}) that "
                f"produced them since the last step. Call the model that {who} was given (if you call a "
                f"compiled model, give {who} that one), and step() once after each backward(). If you call "
                "parts of the model, pass a closure: step(closure)."
            )
        if since.detached:
            return LoopError(
                f"{who}.step() needs gradients, but the {type(self.objective.module).__name__} was "
                f"called with a tensor that is detached from the outputs of the model ({model}), so "
                "that backward() did not reach it. Call the loss with what the model returns: "
                ".detach(), .data and .numpy() cut it off."
            )
        return LoopError(
            f"{who}.step() needs a forward and a backward pass since the last step, but no backward pass "
            f"has reached the outputs of the model ({model}). It was called {since.forwards} times, and "
            f"{since.forwards_without_gradients} times without gradients. Call the model that {who} was "
            "given (a copy if the optimizer was copied or unpickled: optimizer.model), outside of "
            "torch.no_grad() and torch.inference_mode(), and loss.backward() before step()."
        )

    def _missing_loss(self) -> LoopError:
        """The error of a step whose loss was not recorded, so that it can't be computed elsewhere."""
        given = type(self.objective.module).__name__
        needs = "KFAC.step() needs the loss that backward() was called on, to judge its steps. "
        if unread := self.since.unread:
            return LoopError(
                f"{needs}It can't follow how the argument of the {given} was computed from the outputs of "
                f"the model ({type(self.model).__name__}): in a loop without a closure it reads operations "
                f"from autograd's graph, and it can't read {unread}. Move that operation into the model's "
                "forward, or pass a closure, in which every operation is recorded: optimizer.step(closure)."
            )
        return LoopError(
            f"{needs}In a loop without a closure it records calls of the {given} object that KFAC was "
            "given, with outputs of the model; there was none. Call the same object, not a function or "
            f"another {given}: KFAC(model, loss_fn), then loss_fn(model(x), y).backward(). Or pass a "
            "closure, in which every loss is recorded: optimizer.step(closure). Lightning passes "
            "one unless it accumulates gradients."
        )

    # ------------------------------------------------------------------------------------ forward pass

    def _records(self) -> bool:
        return not (
            self._paused
            or torch._C._get_tracing_state() is not None
            or torch._C._functorch.peek_interpreter_stack() is not None
        )

    def _before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        running, recording = self._running.calls, None
        if self._records() and not running:
            if torch.is_grad_enabled():
                recording = self._recording((args, kwargs))
                recording.before_model(module, args, kwargs)
                if not is_compiled(module):
                    recording.enter()
            else:
                self.since.forwards_without_gradients += 1
        running.append(recording)

    def _after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        recording = self._leave()
        if recording is None:
            return
        recording.after_model(module, args, kwargs, outputs)
        record = recording.record
        if not any(isinstance(step, ModelCall) for step in record.own):
            return
        self.since.forwards += 1
        record.read = bool(recording.losses)
        for tensor in tensors_of(outputs):
            if tensor.grad_fn is not None and not record.read:
                tensor.register_hook(lambda gradient: self._arrive(record, gradient))

    def _before_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        running, recording = self._running.calls, None
        if self._records() and not running and torch.is_grad_enabled():
            recording = self._recording((args, kwargs))
            sources = recording.record.sources
            if sources:
                recording.record.mixed = any(record.mixed for record in sources)
                recording.enter()
            else:
                self.since.unread = recording.tape.unread or self.since.unread
                recording = None
                given = tensors_of((args, kwargs))
                self.since.detached += all(t.grad_fn is None for t in given)
        running.append(recording)

    def _after_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        recording = self._leave()
        if recording is not None and recording.losses:
            for source in recording.record.sources:
                source.read = True

    def _recording(self, given: Any) -> Recording:
        """The record of a call, which knows what of its arguments the model has computed."""
        recording = Recording(
            self.model, self.objective, self._buffers, self._arrive, self._indices, self._key
        )
        for tensor in tensors_of(given):
            if tensor.grad_fn is not None:
                recording.tape.index(tensor, read=True)
        return recording

    def _leave(self) -> Recording | None:
        """The record of the call that ends, if there is one."""
        running = self._running.calls
        recording = running.pop() if running else None
        if recording is not None:
            recording.leave()
        return recording

    # ----------------------------------------------------------------------------------- backward pass

    def _arrive(self, at: SeenLoss | Record, gradient: Tensor) -> None:
        """Note that a backward pass has reached a loss, or an output whose loss was not recorded."""
        if self._paused or (isinstance(at, Record) and at.read) or not self._writes_gradients():
            return
        since, grads = self.since, [p.grad for p in self._parameters]
        if (number := torch._C._current_graph_task_id()) != since.backward:
            if all(grad is None for grad in grads):
                self.forget()  # the gradients of earlier ones have been dropped
            if since.backward is None:
                old = {id(p): version for ref, version in self._stepped if (p := ref()) is not None}
                since.added_to_old = any(
                    g is not None and old.get(id(g)) == g._version for g in grads
                )
            since.backward = number
        if isinstance(at, Record):
            since.outputs[at] = None
        else:
            before = since.losses.get(at)
            since.losses[at] = gradient.detach() if before is None else before + gradient.detach()

    def _writes_gradients(self) -> bool:
        """Whether the running backward pass writes gradients: that of `autograd.grad` does not."""
        try:
            return any(
                torch._C._will_engine_execute_node(get_gradient_edge(p).node)
                for p in self._parameters
                if p.requires_grad
            )
        except RuntimeError:  # of `autograd.grad` for a parameter
            return False


def zeroed(who: str) -> str:
    """The message for gradients that were dropped before the step."""
    return (
        f"{who}.step() needs the gradients that loss.backward() has left, but they were dropped or set to "
        "zero since: zero_grad() is called between backward() and step(). Call it before backward(), or "
        "after step()."
    )


class _Running(threading.local):
    """Calls of the model and the loss that this thread is in; None for those that are not recorded."""

    def __init__(self) -> None:
        self.calls: list[Recording | None] = []
