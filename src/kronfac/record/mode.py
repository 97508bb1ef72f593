"""Calls of the model, operations on its outputs and loss calls, recorded while they run.

A `TorchFunctionMode`, which affects this thread alone, sees loss functions and operations on the model's
outputs or with its parameters; hooks on the model and the modules in it see its calls. The factor of a loss
in the objective is the gradient that arrives at it in the backward pass. A closure is recorded as a whole;
in a loop, each call of the model and of the loss (`recorder.py`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from kronfac.errors import ClosureError, TargetError
from kronfac.model.nested import Ref, as_plain, map_leaves, tensors_of
from kronfac.model.side_effects import (
    Buffers,
    Kept,
    RandomState,
    device_of,
    eager_modules,
    instead_of_checkpoints,
    mixed,
    not_reentrant,
    register_hooks,
    remove_hooks,
)
from kronfac.objective import JOINED, READERS, Objective, observe
from kronfac.record.batch import HALF, Batch, Function, LossCall, ModelCall, Operation, loss_input
from kronfac.record.tape import SeenLoss, Tape, assemble

_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CASTS = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.to, torch.Tensor.type}
_GRADIENT = getattr(torch.Tensor.grad, "__get__")  # noqa: B009


class Recording(TorchFunctionMode):
    """Records a closure, or one call of the model or of the loss.

    Args:
        model: the model.
        objective: the loss that KFAC was given.
        buffers: the model's.
        arrive: receives a loss call and a gradient that arrives at it.
        indices: for tensors and losses, in their order.
        key: see `Tape`.
    """

    in_closure = False
    """Whether it is active between calls too."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        buffers: Buffers,
        arrive: Callable[[SeenLoss, Tensor], None],
        indices: Iterator[int] | None = None,
        key: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.paths: dict[nn.Module, str] = {}
        """The names of modules in the model whose calls are recorded; none for the model itself."""
        self.losses: list[SeenLoss] = []
        self._buffers, self._kept = buffers, list[Kept]()
        self._indices = count() if indices is None else indices
        self._arrive = arrive
        self.tape = Tape(model, self._indices, key)
        self.record = self.tape.record
        self._wrote = ""  # the function that has written to outputs in place
        self._thread = threading.get_ident()
        self._device = device_of(model)
        self._depth = 0  # of calls that run; a backward pass, which may repeat some, counts too
        self._until_end = ExitStack()  # of the running call
        self._random: RandomState | None = None
        self._given: Any = None  # what the running call was given
        self._inputs: set[int] = set()  # ids of tensors that the model was called with
        self._rows: set[int] = set()  # their lengths
        self._inside: list[int] = []  # what the running call has called losses with

    def enter(self) -> None:
        """See torch functions until the running call ends."""
        self._until_end.enter_context(self)

    def leave(self) -> None:
        """See no more of them."""
        self._until_end.close()

    # ------------------------------------------------------------------------------------- the model

    def before_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A forward pre-hook."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth > 1:
            return
        inputs = tensors_of((args, kwargs))
        if torch.is_grad_enabled():
            self._refuse_written(inputs)
        self._inside = []
        self._given = self.tape.references((args, kwargs))[0]
        self._inputs |= {id(t) for t in inputs}
        self._rows |= {len(t) for t in inputs if t.dim() and len(t) > 1}
        self._watch(self._given)
        if self.in_closure and hasattr(module, "_orig_mod"):  # the compiler would trace this mode
            self._until_end.enter_context(_pop_mode_temporarily())
        self._random = RandomState.current(self._device)
        self._kept = self._buffers.before_call(self.paths.get(module, ""))

    def after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """A forward hook, called also if the forward pass failed."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._until_end.close()
        given, self._given = self._given, None
        path = self.paths.get(module, "")
        start, self._kept = self._buffers.after_call(path, self._kept), []
        tensors = tensors_of(outputs)
        if not any(tensor.requires_grad for tensor in tensors):  # an evaluation on the side
            return
        before = self._random
        assert before is not None
        self.record.mixed = self.record.mixed or mixed(tensors[0].device)
        given_args, given_kwargs = self._in_full(given)
        call = ModelCall(
            given_args,
            given_kwargs,
            outputs=tuple(map(self.tape.remember, tensors)),
            losses=tuple(self._inside),
            random=self._drawn_from(before),
            buffers=start,
            path=path,
            shapes=tuple(tensor.shape for tensor in tensors),
        )
        self.record.own.append(call)

    # --------------------------------------------------------------------------------- torch functions

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See every torch function that this thread calls."""
        kwargs = kwargs or {}
        self.record.mixed = self.record.mixed or (self._depth > 0 and mixed(self._device))
        if func in JOINED:
            with self:
                return JOINED[func](*args, **kwargs)
        if func in READERS:
            return self._on_loss(func, args, kwargs)
        if self._depth or func == _GRADIENT:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            self._depth += 1  # checkpoints call modules again
            try:
                return func(*args, **kwargs)
            finally:
                self._depth -= 1
        # Before it is called: it may write to its arguments.
        given, known, trained = self.tape.references((args, kwargs))
        if not (known or (trained and torch.is_grad_enabled())):
            return func(*args, **kwargs)
        return self._operate(func, args, kwargs, given, known)

    def _operate(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, known: bool
    ) -> Any:
        """Call a function of known tensors, and record it unless it can't be repeated."""
        before = tensors_of((args, kwargs))
        versions = [tensor._version for tensor in before]
        lost = self.tape.lost(before)
        random = RandomState.current(self._device)
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        changed = [t for t, v in zip(before, versions, strict=True) if t._version != v]
        if any(tensor.requires_grad for tensor in changed):
            self._wrote = getattr(func, "__name__", str(func))
        if changed or lost or not (known or any(tensor.requires_grad for tensor in tensors)):
            return result
        if self.record.mixed and func in _CASTS and result.dtype == self._dtype:
            index = self.tape.index(args[0])
            if index is not None and args[0].dtype in HALF:
                # Without autocast there is nothing to cast: to the same index.
                self.tape.remember(result, index)
                return result
        if tensors:
            given_args, given_kwargs = map_leaves(given, as_plain)
            indices, drawn = tuple(map(self.tape.remember, tensors)), self._drawn_from(random)
            self.record.own.append(Operation(func, given_args, given_kwargs, indices, drawn))
        return result

    def _on_loss(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a loss function, and record it if its outputs are known or the model calls it."""
        if func == functional.mse_loss and not self._depth:
            args, kwargs = self._as_residual(args, kwargs)
        outputs = loss_input(args, kwargs)
        index = self.tape.index(outputs)
        if not (torch.is_grad_enabled() and outputs.requires_grad):
            return func(*args, **kwargs)
        if self._depth:
            index = next(self._indices)
        elif index is None:  # not computed by the model, or by something that can't be repeated
            self._refuse_written([outputs])
            return func(*args, **kwargs)
        if outputs.numel() == 0:
            raise TargetError(
                f"KFAC needs at least one example to take a step from; {func.__name__} is called with "
                f"outputs of shape {tuple(outputs.shape)}. Leave out empty mini-batches."
            )
        plain_args, plain_kwargs = map_leaves((args, kwargs), as_plain)
        # First: its errors have a remedy, and torch's warnings would point to a line in here.
        terms = READERS[func](*plain_args, **plain_kwargs)
        result = func(*args, **kwargs)
        if self._depth:
            self._inside.append(index)
        self._watch(terms.targets)
        given_args, given_kwargs = self._in_full(
            map_leaves((args, kwargs), lambda x: Ref(index) if x is outputs else as_plain(x))
        )
        if func is observe:
            tensor, call = outputs, LossCall(index, terms, args=given_args, kwargs=given_kwargs)
        else:
            # A copy: the closure may go on with the loss in place.
            tensor, value = result, as_plain(result).detach().clone()
            call = LossCall(index, terms, value, func, given_args, given_kwargs)
        self.tape.lost([t for t in tensors_of((args, kwargs)) if t is not outputs])
        outside = {
            id(t): t.shape
            for t in self.tape.outside.values()
            # Inputs that derivatives are taken by may reach the model in parts.
            if id(t) not in self._inputs and not (t.dim() and len(t) in self._rows)
        }
        seen = SeenLoss(call, next(self._indices), self.record, outside)
        self.losses.append(seen)
        arrive = self._arrive
        if tensor.grad_fn is not None:
            # Not a method: the graph, which holds on to the hook, would keep the recording.
            tensor.register_hook(lambda gradient: arrive(seen, gradient))
        return result

    def _as_residual(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of a squared error; if its targets are learned too, the outputs are the difference."""
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        z, target = given.pop("input"), given.pop("target")
        if self.tape.index(target) is None or not target.requires_grad:
            return args, kwargs
        with self:
            residual = z - target
        return (residual, torch.zeros_like(residual), *args[2:]), given

    # ----------------------------------------------------------------------------------------- values

    def _refuse_written(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that were computed by writing to the model's outputs in place."""
        if self._wrote and self.tape.lost(tensors):
            raise ClosureError(
                "KFAC repeats what was done between the model and the loss, but it can't repeat writes in "
                f"place; it got outputs that {self._wrote} has written to. Compute a new tensor instead, "
                "for example by torch.where, masked_fill, torch.cat or torch.stack."
            )

    def _drawn_from(self, before: RandomState) -> RandomState | None:
        """The state that random numbers were drawn from since; None if none were."""
        return None if before.same_as(RandomState.current(self._device)) else before

    def _watch(self, values: Any) -> None:
        """Remember the versions of these tensors, to find out whether they were written to."""
        tensors = tensors_of(values)
        self.record.versions += [(t, t._version) for t in tensors if not t.is_inference()]

    def _in_full(self, values: Any) -> Any:
        """Values without a graph, and cast from half precision to the parameters' dtype."""

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf if leaf.is_leaf else leaf.detach()
            return leaf.to(self._dtype) if self.record.mixed and leaf.dtype in HALF else leaf

        return map_leaves(values, convert)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return next(p.dtype for p in self.model.parameters() if p.requires_grad)


class ClosureRecording(Recording):
    """What happens inside a closure."""

    in_closure = True

    def __init__(self, model: nn.Module, objective: Objective, buffers: Buffers) -> None:
        arrived: dict[SeenLoss, Tensor] = {}

        def arrive(seen: SeenLoss, gradient: Tensor) -> None:
            arrived[seen] = arrived[seen] + gradient if seen in arrived else gradient

        super().__init__(model, objective, buffers, arrive)
        self._arrived = arrived

    def batch(self) -> Batch:
        """The mini-batch of the closure.

        Raises:
            ClosureError: the model was not called, or its inputs were changed afterwards.
        """
        changed = ClosureError(
            "The closure changed inputs or targets in place after it had called the model with them, "
            "but KFAC goes through the same examples again. Use a new tensor for every call."
        )
        losses = {seen: self._arrived.get(seen) for seen in self.losses}
        batch = assemble(losses, [self.record], self.objective, changed)
        if batch is None:
            raise ClosureError(
                f"The closure never called the model ({type(self.model).__name__}) with gradients "
                "enabled, so there is nothing to take a step from. Call the model that KFAC was "
                "given, in the closure; what it returns may be tensors, containers, or dataclasses of them."
            )
        return batch


@contextmanager
def record(
    model: nn.Module, objective: Objective, buffers: Buffers | None = None
) -> Iterator[ClosureRecording]:
    """Record everything that this thread does with the model and losses, inside this context.

    `buffers` are the model's, or those of the module inside it if it is compiled.
    """
    own: nn.Module = getattr(model, "_orig_mod", model)
    recording = ClosureRecording(model, objective, Buffers(own) if buffers is None else buffers)
    recording.paths = {module: path for path, module in eager_modules(model)}
    with ExitStack() as stack:
        for module in recording.paths:
            hooks = register_hooks(module, recording.before_model, recording.after_model)
            stack.callback(remove_hooks, hooks)
        stack.enter_context(instead_of_checkpoints(not_reentrant))
        stack.enter_context(recording)
        yield recording
