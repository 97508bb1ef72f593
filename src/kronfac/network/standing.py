"""What a training loop did with the model and the loss since the last step, without a closure.

A record lives on the graph that it is of: at the nodes of the model's outputs, then in a hook of the loss.
So a forward pass that is never differentiated leaves nothing behind. A backward pass that comes to the loss
brings the record here, where it stays until the step, or until gradients are dropped. No graph and no
activations are kept, only what the model and the loss were called with.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.network.backward_watch import BackwardWatch
from kronfac.network.between import Known, trace_back
from kronfac.network.nested import tensors_of
from kronfac.network.other_losses import OtherLosses
from kronfac.network.program import Batch, ModelCall
from kronfac.network.recorded_calls import Arrival, CallRecording, Calls, assemble, joined
from kronfac.network.side_effects import Buffers, device_of
from kronfac.network.standing_hooks import stand_by
from kronfac.objective import LISTENERS, Likelihood, Objective, observe
from kronfac.precision import mixed

_RECORDERS = count()


class _Running(threading.local):
    """Calls of the model and the loss that this thread is in; None for those that are not recorded."""

    def __init__(self) -> None:
        self.calls: list[CallRecording | None] = []


class StandingRecorder:
    """Remembers what the model and the loss were called with, for a step without a closure."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
    ) -> None:
        self.model = model
        self.objective = objective
        self.forwards = 0
        """Calls of the model with gradients enabled, since the last step."""
        self.forwards_without_gradients = 0
        self.unread = 0
        """Tensors that the loss was called with and that could not be followed back to the model."""
        self.watch = BackwardWatch(parameters, self._end_backward)
        self.others = OtherLosses(self._is_output)
        self._buffers = buffers
        self._key = next(_RECORDERS)
        self._indices: Iterator[int] = count()
        self._running = _Running()
        self._paused = 0
        self._looks_inside = True  # of the model, for losses
        self._mixes_inside = False  # whether the model opens an autocast of its own
        self._arriving: list[tuple[Arrival | Calls, int, Tensor]] = []
        self._arrivals: list[Arrival] = []
        self._outputs: dict[Calls, dict[int, Tensor]] = {}
        self.handles = [
            *stand_by(model, self._before_model, self._after_model),
            *stand_by(objective.module, self._before_loss, self._after_loss),
        ]
        LISTENERS.add(self)

    # ---------------------------------------------------------------------------------- what is kept

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing while this lasts: K-FAC's own passes, and closures, whose record is another."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def records(self) -> tuple[Arrival | Calls, ...]:
        """What backward passes since the last step have come to, and whose gradients were not dropped."""
        return (*self._arrivals, *self._outputs)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """Those of them that are calls of the loss."""
        return tuple(self._arrivals)

    @property
    def running(self) -> list[CallRecording | None]:
        """Calls of the model and the loss that this thread is in."""
        return self._running.calls

    def forget(self) -> None:
        """Drop what was recorded: it has been used, or its gradients were dropped."""
        for arrival in self._arrivals:
            arrival.arrived = None  # a graph that is retained may be gone through again
        self._arrivals, self._arriving, self._outputs = [], [], {}

    def step(self) -> None:
        """A step goes by what was recorded: the next one begins."""
        if self._arrivals:
            self._looks_inside = any(arrival.inside for arrival in self._arrivals)
        self.forget()
        self.others.stop()
        self.watch.step()
        self.forwards = self.forwards_without_gradients = self.unread = 0

    def batch(self) -> Batch | None:
        """The mini-batch since the last step; None if no backward pass has come to the model's outputs.

        Raises:
            LoopError: inputs or targets were changed since.
        """
        return assemble(self._arrivals, list(self._outputs), self.objective)

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
            self.watch.give_up()
            if torch.is_grad_enabled():
                # The compiler would trace a mode.
                compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
                looks_inside = self._looks_inside and not compiled
                recording = self._recording(mode=looks_inside)
                recording.mixed = self._mixes_inside and not looks_inside
                self._recognize((args, kwargs), recording)
                recording.buffer_versions = self._buffers.versions()
                recording.before_model("", module, args, kwargs)
                recording.enter()
            else:
                self.forwards_without_gradients += 1
        running.append(recording)

    def _after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        recording = self._leave()
        if recording is None:
            return
        self._mixes_inside = recording.mixed and not mixed(device_of(self.model))
        recording.after_model("", module, args, kwargs, outputs)
        self._buffers.note_writes(recording.buffer_versions)
        call = recording.steps[-1] if recording.steps else None
        if not isinstance(call, ModelCall):
            return
        self.forwards += 1
        if not (hasattr(module, "_orig_mod") or module._compiled_call_impl is not None):
            self.others.listen()
        calls = Calls(
            joined(recording.sources, recording.steps),
            [v for source in recording.sources for v in source.versions] + recording.versions,
            recording.shapes,
            recording.mixed,
            next(self._indices),
            read=bool(recording.arrivals),
        )
        for arrival in recording.arrivals:
            arrival.calls.append(calls)
            arrival.inside = True
        for tensor, index in zip(tensors_of(outputs), call.outputs, strict=True):
            self._attach(tensor, index, calls)

    def hear(self, z: Tensor, likelihood: Likelihood, **options: Any) -> None:
        """A declaration by `kronfac.observe`, outside of the model."""
        self._before_loss(self.model, (z,), {})
        if self._running.calls[-1] is not None:
            observe(z, likelihood, **options)
        self._after_loss(self.model, (z,), {}, z)

    def _before_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        running, recording = self._running.calls, None
        if self._records() and not running and torch.is_grad_enabled():
            recording = self._recording()
            self._recognize((args, kwargs), recording)
            if recording.sources:
                recording.mixed = any(calls.mixed for calls in recording.sources)
                recording.enter()
            else:
                recording = None
        running.append(recording)

    def _after_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        recording = self._leave()
        if recording is None:
            return
        for arrival in recording.arrivals:
            arrival.calls += recording.sources
            arrival.steps = recording.steps
            arrival.versions = recording.versions
            for calls in recording.sources:
                calls.read = True

    def _recording(self, mode: bool = True) -> CallRecording:
        return CallRecording(
            self.model, self.objective, self._buffers, self._indices, self._arrive, mode
        )

    def _leave(self) -> CallRecording | None:
        """The record of the call that ends, if there is one."""
        running = self._running.calls
        recording = running.pop() if running else None
        if recording is not None:
            recording.leave()
        return recording

    def _recognize(self, values: Any, recording: CallRecording) -> None:
        """Let a recording know what among values was computed from outputs of the model."""
        for tensor in tensors_of(values):
            if tensor.grad_fn is not None:
                found = trace_back(tensor, self._known, self._indices)
                if found is None:
                    self.unread += 1
                else:
                    recording.recognize(found, tensor)

    def _is_output(self, module: nn.Module, tensor: Tensor) -> bool:
        """Whether another module than the model and its loss is given what the model has computed."""
        known = module is self.model or module is self.objective.module
        if known or tensor.grad_fn is None or self._running.calls or not self._records():
            return False
        return trace_back(tensor, self._known, count()) is not None

    def _known(self, node: Any, number: int) -> Known | None:
        known: dict[tuple[int, int], Known] | None = node.metadata.get("kronfac")
        return None if known is None else known.get((self._key, number))

    def _attach(self, tensor: Tensor, index: int, calls: Calls) -> None:
        """Let an output of the model carry what it was computed by, on its graph."""
        if tensor.grad_fn is None:
            return
        node: Any = tensor.grad_fn
        known = node.metadata.setdefault("kronfac", {})
        known[self._key, tensor.output_nr] = Known(index, calls, calls.mixed)
        if not calls.read:
            tensor.register_hook(lambda gradient: self._arrive(calls, gradient, index))

    # ----------------------------------------------------------------------------------- backward pass

    def _arrive(self, at: Arrival | Calls, gradient: Tensor, index: int = 0) -> None:
        """Note that a backward pass has come to a loss, or to an output that no loss is known of."""
        if self._paused or (isinstance(at, Calls) and at.read):
            return
        if self.watch.begin():
            self.forget()  # the gradients of earlier ones have been dropped
        self._arriving.append((at, index, gradient.detach()))

    def _end_backward(self, written: bool) -> None:
        arriving, self._arriving = self._arriving, []
        if not written:
            return
        for at, index, gradient in arriving:
            if isinstance(at, Calls):
                self._outputs.setdefault(at, {})[index] = gradient
                continue
            at.arrive(gradient)
            if not any(other is at for other in self._arrivals):
                self._arrivals.append(at)
