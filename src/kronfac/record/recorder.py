"""The calls of the model and the loss in a training loop without a closure, since the last step.

A record is attached to its graph: to the nodes of the model's outputs, then to a hook of the loss. So a
forward pass that is never differentiated leaves nothing behind. A backward pass that arrives at the loss
hands the record to the recorder, which keeps it until the step, or until gradients are dropped. No graph
and no activations are kept, only the arguments of the model and the loss.

A hook calls `BackwardWatch.begin` in the middle of a backward pass. At its end, torch calls back: from then
on, the gradients that it has written are known by their versions.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from kronfac.errors import LoopError
from kronfac.model.nested import tensors_of
from kronfac.model.own_pass import mixed
from kronfac.model.side_effects import Buffers, device_of, register_hooks
from kronfac.objective import LISTENERS, Likelihood, Objective, observe
from kronfac.record.batch import Batch, ModelCall
from kronfac.record.graph import Known, trace_back
from kronfac.record.losses import Record, SeenLoss, assemble
from kronfac.record.mode import Recording, is_compiled

_RECORDERS = count()


def _copied(value: Any) -> Any:
    """A list, a set or a dict, which are written to in place, as it is now."""
    return value.copy() if type(value) in (list, set, dict) else value


class _Running(threading.local):
    """Calls of the model and the loss that this thread is in; None for those that are not recorded."""

    def __init__(self) -> None:
        self.calls: list[Recording | None] = []


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
        self.forwards = 0
        """Calls of the model with gradients enabled, since the last step."""
        self.forwards_without_gradients = 0
        self.unread = 0
        """Tensors that the loss was called with and that could not be followed back to the model."""
        self.detached = 0
        """Calls of the loss with tensors that have no graph."""
        self.watch = BackwardWatch(parameters, self._end_backward)
        self._buffers = buffers
        self._key = next(_RECORDERS)
        self._indices: Iterator[int] = count()
        self._running = _Running()
        self._paused = 0
        self._looks_inside = True  # of the model, for losses
        self._mixes_inside = False  # whether the model opens an autocast of its own
        self._arriving: list[tuple[SeenLoss | Record, int, Tensor]] = []
        self._losses: list[SeenLoss] = []
        self._outputs: dict[Record, dict[int, Tensor]] = {}
        self.handles = [
            *register_hooks(model, self._before_model, self._after_model),
            *register_hooks(objective.module, self._before_loss, self._after_loss),
        ]
        LISTENERS.add(self)

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
        return (*self._losses, *self._outputs)

    @property
    def losses(self) -> tuple[SeenLoss, ...]:
        """The loss calls among the records."""
        return tuple(self._losses)

    @property
    def running(self) -> list[Recording | None]:
        """Calls of the model and the loss that this thread is in."""
        return self._running.calls

    def forget(self) -> None:
        """Drop what was recorded: it has been used, or its gradients were dropped."""
        for seen in self._losses:
            seen.arrived = None  # a graph that is retained may be gone through again
        self._losses, self._arriving, self._outputs = [], [], {}

    def snapshot(self) -> Callable[[], None]:
        """A function that restores the record as it is now, for a step that fails."""
        kept = [
            (where, {k: _copied(v) for k, v in vars(where).items()}) for where in (self, self.watch)
        ]
        arrived = [(loss, loss.arrived) for loss in self._losses]
        running = list(self.running)

        def restore() -> None:
            for where, values in kept:
                vars(where).update({k: _copied(v) for k, v in values.items()})
            # torch calls no hook after a call that a KeyboardInterrupt has ended.
            self.running[:] = running
            for loss, gradient in arrived:
                loss.arrived = gradient

        return restore

    def step(self) -> None:
        """Begin the record of the next step."""
        if self._losses:
            self._looks_inside = any(seen.inside for seen in self._losses)
        self.forget()
        self.watch.step()
        self.forwards = self.forwards_without_gradients = self.unread = self.detached = 0

    def batch(
        self, who: str = "KFAC", needs_loss: bool = True, ended_by_closure: bool = False
    ) -> Batch | None:
        """The mini-batch since the last step; None if all gradients are zero, as checkpoint tools set them.

        Args:
            who: the optimizer, for errors.
            needs_loss: whether the loss has to be recorded, and not only what the model computed.
            ended_by_closure: whether `step` received a closure with the last of several micro-batches.

        Raises:
            LoopError: a pass is missing, its gradients were dropped, its inputs or targets were changed
                since, or its loss was not recorded.
        """
        if self.watch.dropped():
            raise LoopError(
                f"{who}.step() needs the gradients that loss.backward() has left, but they were dropped "
                "or set to zero since: zero_grad() is called between backward() and step(). Call it "
                "before backward(), or after step()."
            )
        changed = LoopError(
            "Inputs or targets were changed in place after the model or the loss was called with them, but "
            f"{who}.step goes through the same examples again. Use a new tensor for every call, or call "
            "step() before you change them."
        )
        batch = assemble(self._losses, list(self._outputs), self.objective, changed)
        if batch is None and not self.watch.only_zeros():
            raise self._missing_pass(who)
        if batch is not None and needs_loss and batch.recorded_loss is None:
            raise self._missing_loss(batch, ended_by_closure)
        return batch

    def _missing_pass(self, who: str) -> LoopError:
        """The error of a step without a recorded call that a backward pass has reached."""
        model = type(self.model).__name__
        if not self.watch.any_gradient():
            if self.forwards and self.detached:
                return LoopError(
                    f"{who}.step() needs gradients, but the {type(self.objective.module).__name__} was "
                    f"called with a tensor that is detached from the outputs of the model ({model}), so "
                    "that backward() did not reach it. Call the loss with what the model returns: "
                    ".detach(), .data and .numpy() cut it off."
                )
            if self.forwards:
                return LoopError(
                    f"{who}.step() needs gradients, but no backward pass has come to the outputs of the "
                    f"model ({model}) since it was called. Call loss.backward() before step()."
                )
            without = self.forwards_without_gradients
            seen = f"; it was called {without} times without gradients" if without else ""
            return LoopError(
                f"{who}.step() needs a forward and a backward pass since the last step, but the model "
                f"({model}) has not been called{seen}. Call the model that {who} was given (a copy if the "
                "optimizer was copied or unpickled: optimizer.model), outside of torch.no_grad() and "
                "torch.inference_mode(), then loss.backward(), then step()."
            )
        return LoopError(
            f"{who}.step() found gradients, but has not seen the call of the model ({model}) that they are "
            f"of since the last step. Call the model that {who} was given itself (if it is compiled, give "
            f"{who} the compiled one), and step() once after each backward(); for parts of a model, use a "
            "closure: step(closure)."
        )

    def _missing_loss(self, batch: Batch, ended_by_closure: bool) -> LoopError:
        """The error of a step whose loss was not recorded, so that it can't be computed elsewhere."""
        given = type(self.objective.module).__name__
        if not batch.assumed:
            found = "kronfac.observe declares the curvature of a loss, but not its value"
        elif self.unread:
            found = (
                "it was called with something that KFAC cannot trace back to the model's outputs"
            )
        else:
            found = "it was not called with the model's outputs"
        remedy = "pass a closure, in which every loss is recorded: optimizer.step(closure)"
        if ended_by_closure:  # as Lightning does, whose user writes none
            remedy = "do not accumulate gradients: then functions are recorded too"
        return LoopError(
            "KFAC.step() needs the loss that backward() was called on, to tell a good step from a bad one. "
            f"In a loop without a closure it records calls of the {given} object that KFAC was given, and "
            f"{found}. Call the same object, not a function or another {given}: KFAC(model, loss_fn), then "
            f"loss_fn(model(x), y).backward(). Or {remedy}."
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
            self.watch.give_up()
            if torch.is_grad_enabled():
                looks_inside = self._looks_inside and not is_compiled(module)
                recording = self._recording(mode=looks_inside)
                recording.mixed = self._mixes_inside and not looks_inside
                self._recognize((args, kwargs), recording)
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
        call = recording.steps[-1] if recording.steps else None
        if not isinstance(call, ModelCall):
            return
        self.forwards += 1
        record = recording.record(next(self._indices))
        for seen in recording.losses:
            seen.record, seen.inside = record, True
        for tensor, index in zip(tensors_of(outputs), call.outputs, strict=True):
            self._attach(tensor, index, record)

    def _before_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        running, recording = self._running.calls, None
        if self._records() and not running and torch.is_grad_enabled():
            recording = self._recording()
            self._recognize((args, kwargs), recording)
            if recording.sources:
                recording.mixed = any(record.mixed for record in recording.sources)
                recording.enter()
            else:
                recording = None
                self.detached += all(t.grad_fn is None for t in tensors_of((args, kwargs)))
        running.append(recording)

    def _after_loss(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        recording = self._leave()
        if recording is None or not recording.losses:
            return
        record = recording.record(next(self._indices))
        for seen in recording.losses:
            seen.record = record
        for source in recording.sources:
            source.read = True

    def on_observe(self, z: Tensor, likelihood: Likelihood, **options: Any) -> None:
        """A declaration by `kronfac.observe`, outside of the model."""
        self._before_loss(self.model, (z,), {})
        if self._running.calls[-1] is not None:
            observe(z, likelihood, **options)
        self._after_loss(self.model, (z,), {}, z)

    def _recording(self, mode: bool = True) -> Recording:
        return Recording(
            self.model, self.objective, self._buffers, self._indices, self._arrive, mode
        )

    def _leave(self) -> Recording | None:
        """The record of the call that ends, if there is one."""
        running = self._running.calls
        recording = running.pop() if running else None
        if recording is not None:
            recording.leave()
        return recording

    def _recognize(self, values: Any, recording: Recording) -> None:
        """Let a recording know the tensors among values that were computed from the model's outputs."""
        for tensor in tensors_of(values):
            if tensor.grad_fn is not None:
                found = trace_back(tensor, self._known, self._indices)
                if found is None:
                    self.unread += 1
                else:
                    source = found.start.record
                    recording.recognize(tensor, found.index, source, found.operations)

    def _known(self, node: Any, number: int) -> Known | None:
        known: dict[tuple[int, int], Known] | None = node.metadata.get("kronfac")
        return None if known is None else known.get((self._key, number))

    def _attach(self, tensor: Tensor, index: int, record: Record) -> None:
        """Keep the record of an output of the model with the output's node of the graph."""
        if tensor.grad_fn is None:
            return
        node: Any = tensor.grad_fn
        known = node.metadata.setdefault("kronfac", {})
        known[self._key, tensor.output_nr] = Known(index, record)
        if not record.read:
            tensor.register_hook(lambda gradient: self._arrive(record, gradient, index))

    # ----------------------------------------------------------------------------------- backward pass

    def _arrive(self, at: SeenLoss | Record, gradient: Tensor, index: int = 0) -> None:
        """Note that a backward pass has reached a loss, or an output whose loss was not recorded."""
        if self._paused or (isinstance(at, Record) and at.read):
            return
        if self.watch.begin():
            self.forget()  # the gradients of earlier ones have been dropped
        self._arriving.append((at, index, gradient.detach()))

    def _end_backward(self, written: bool) -> None:
        arriving, self._arriving = self._arriving, []
        if not written:
            return
        for at, index, gradient in arriving:
            if isinstance(at, Record):
                self._outputs.setdefault(at, {})[index] = gradient
                continue
            at.arrive(gradient)
            if not any(other is at for other in self._losses):
                self._losses.append(at)


# ------------------------------------------------------------------------------------- backward passes


class BackwardWatch:
    """Versions of gradients at the end of the last backward pass, and at the last step."""

    def __init__(self, parameters: Sequence[nn.Parameter], ended: Callable[[bool], None]) -> None:
        self._parameters = parameters
        self._ended = ended
        """Called at the end, with whether gradients were written: `autograd.grad` writes none."""
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._left: Any = WeakTensorKeyDictionary()
        self._stepped: Any = WeakTensorKeyDictionary()
        self.passes = 0
        """Backward passes since the last step."""
        self.added_to_old = False
        """Whether the first of them has added to the gradients of the last step."""

    def begin(self) -> bool:
        """Whether a new backward pass has begun, and there were no gradients before it."""
        if self._before is not None:
            return False
        self._before = self._gradients()
        # After the callbacks of this pass: DistributedDataParallel writes gradients in its own.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._end))
        return all(gradient is None for gradient, _ in self._before)

    def give_up(self) -> None:
        """Forget a backward pass that has failed."""
        self._before = None

    def _end(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        now = self._gradients()
        written = any(
            g is not old or v != version for (g, v), (old, version) in zip(now, before, strict=True)
        )
        if written:
            old = (self._stepped.get(g) == version for g, version in before if g is not None)
            self.added_to_old = self.added_to_old or (not self.passes and any(old))
            self.passes += 1
            self._left = _versions(now)
        self._ended(written)

    def step(self) -> None:
        """Note the gradients that a step has used."""
        self._stepped = _versions(self._gradients())
        self.passes, self.added_to_old = 0, False

    def dropped(self) -> bool:
        """Whether the gradients of backward passes since the last step were dropped, or zeroed in place."""
        if not self.passes:
            return False
        now = self._gradients()
        if all(g is None for g, _ in now):
            return True
        touched = any(g is not None and self._left.get(g, v) != v for g, v in now)
        return touched and not any(g is not None and bool(g.any()) for g, _ in now)

    def any_gradient(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(p.grad is not None for p in self._parameters)

    def only_zeros(self) -> bool:
        """Whether there are gradients, and all of them are zero."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return bool(grads) and not any(bool(grad.any()) for grad in grads)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        grads = [p.grad for p in self._parameters]
        return [(None, 0) if g is None else (g, g._version) for g in grads]


def _versions(gradients: Sequence[tuple[Tensor | None, int]]) -> Any:
    versions = WeakTensorKeyDictionary()
    for gradient, version in gradients:
        if gradient is not None:
            versions[gradient] = version
    return versions
