"""Calls of the model, operations on its outputs and loss calls, recorded while they run.

A `TorchFunctionMode`, which is this thread's alone, sees loss functions and operations on the model's
outputs or with its parameters; hooks on the model and the modules in it see its calls. The factor of a loss
in the objective is the gradient that arrives at it in the backward pass. A closure is recorded as a whole
(`record`); in a loop, each call of the model and of the loss (`recorder.py`).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from kronfac.errors import ClosureError, TargetError
from kronfac.model.nested import Ref, as_plain, map_leaves, tensors_of
from kronfac.model.own_pass import instead_of_checkpoints, mixed, not_reentrant
from kronfac.model.side_effects import Buffers, Kept, RandomState, device_of
from kronfac.objective import JOINED, READERS, Objective, observe
from kronfac.record.batch import (
    HALF,
    Batch,
    Function,
    LossCall,
    ModelCall,
    Operation,
    loss_input,
)
from kronfac.record.graph import Found
from kronfac.record.losses import Record, SeenLoss, Step, Versions, assemble, joined
from kronfac.record.tape import Tape, written_by

_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CASTS = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.to, torch.Tensor.type}
_BROADCASTING = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
} & set(READERS)
_GRADIENT = getattr(torch.Tensor.grad, "__get__")  # noqa: B009


class Recording(TorchFunctionMode):
    """What happens inside a closure, or inside one call of the model or of the loss.

    Args:
        model: the model.
        objective: the loss that KFAC was given.
        buffers: those of the model.
        indices: for tensors and losses, in their order.
        arrive: receives a loss call and the gradient that arrives at it.
        mode: whether torch functions are recorded; a compiler would trace the mode.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        buffers: Buffers,
        indices: Iterator[int] | None = None,
        arrive: Callable[[SeenLoss, Tensor], None] = SeenLoss.arrive,
        mode: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.steps: list[Step] = []
        self.losses: list[SeenLoss] = []
        self.sources: list[Record] = []
        """Earlier calls of the model whose outputs it was given."""
        self.versions: Versions = []
        """Tensors that were given to calls, with their versions, to find out if they were written to."""
        self.mixed = False
        self._buffers, self._kept = buffers, list[Kept]()
        self._indices = count() if indices is None else indices
        self._arrive = arrive
        self._mode = mode
        self._tape = Tape(model, self._indices)
        self._thread = threading.get_ident()
        self._device = device_of(model)
        self._depth = 0  # of calls that run; a backward pass, which may repeat some, counts too
        self._suspended = ExitStack()
        self._random: RandomState | None = None
        self._given: Any = None  # what the running call was given
        self._inputs: set[int] = set()  # ids of tensors that the model was called with
        self._rows: set[int] = set()  # their lengths
        self._inside: list[int] = []  # what the running call has called losses with

    def enter(self) -> None:
        """Record torch functions from now on."""
        if self._mode:
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Record no more torch functions."""
        if self._mode:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def recognize(self, found: Found, tensor: Tensor) -> None:
        """Know a tensor by how it was computed from the model's outputs."""
        self._tape.recognize(tensor, found.index)
        self.steps += found.operations
        self.sources.append(found.start.record)

    # ------------------------------------------------------------------------------------- the model

    def before_model(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A forward pre-hook."""
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._inside = []
        self._given = self._tape.references((args, kwargs))[0]
        inputs = tensors_of((args, kwargs))
        self._inputs |= {id(t) for t in inputs}
        self._rows |= {len(t) for t in inputs if t.dim() and len(t) > 1}
        self._watch(self._given)
        if self._mode and hasattr(module, "_orig_mod"):  # the compiler would trace this mode
            self._suspended.enter_context(_pop_mode_temporarily())
        self._random = RandomState.current(self._device)
        self._kept = self._buffers.before_call(path)

    def after_model(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> None:
        """A forward hook, called also if the forward pass failed."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._suspended.close()
        given, self._given = self._given, None
        start, self._kept = self._buffers.after_call(path, self._kept), []
        tensors = tensors_of(outputs)
        if not any(tensor.requires_grad for tensor in tensors):  # an evaluation on the side
            return
        before = self._random
        assert before is not None
        self.mixed = self.mixed or mixed(tensors[0].device)
        drew = not before.same_as(RandomState.current(self._device))
        given_args, given_kwargs = self._in_full(given)
        call = ModelCall(
            given_args,
            given_kwargs,
            outputs=tuple(self._tape.remember(tensor) for tensor in tensors),
            losses=tuple(self._inside),
            random=before if drew else None,
            buffers=start,
            path=path,
        )
        self.steps.append(call)

    # --------------------------------------------------------------------------------- torch functions

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See every torch function that this thread calls."""
        kwargs = kwargs or {}
        self.mixed = self.mixed or (self._depth > 0 and mixed(self._device))
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
        given, known, trained = self._tape.references((args, kwargs))
        if not (known or (trained and torch.is_grad_enabled())):
            return func(*args, **kwargs)
        return self._operate(func, args, kwargs, given, known)

    def _operate(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, known: bool
    ) -> Any:
        """Call a function of what is known, and record that; not if it can't be done again."""
        own = (
            written_by(func, args) if self._tape.index(args[0] if args else None) is None else None
        )
        value = None if own is None else own.detach().clone()
        before = tensors_of((args, kwargs))
        versions = [tensor._version for tensor in before]
        lost = self._tape.lost(before)
        random = RandomState.current(self._device)
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        changed = [t for t, v in zip(before, versions, strict=True) if t._version != v]
        if lost or not (known or any(tensor.requires_grad for tensor in tensors)):
            return result
        if self._undoes_autocast(func, args, result):
            self._tape.alias(result, args[0])  # without autocast there is nothing to undo
            return result
        written: list[tuple[int, int]] = []
        if own is not None and any(own is t for t in changed):
            written.append(self._take_over(own, value))
            given = map_leaves(given, lambda leaf: Ref(written[0][0]) if leaf is own else leaf)
        if changed:
            others = self._tape.written(but=[seen.call.input for seen in self.losses])
            if others is None or not written + others:
                return result  # a loss was called with what is gone now, or nothing of it is known
            written += others
        if tensors or written:
            drew = not random.same_as(RandomState.current(self._device))
            given_args, given_kwargs = map_leaves(given, as_plain)
            self.steps.append(
                Operation(
                    func,
                    given_args,
                    given_kwargs,
                    tuple(map(self._tape.remember, tensors)),
                    tuple(written),
                    random if drew else None,
                )
            )
        return result

    def _take_over(self, own: Tensor, value: Tensor | None) -> tuple[int, int]:
        """Indices for a tensor of the closure's own, before and after it was written to."""
        assert value is not None
        before = self._tape.remember(value, known=False)
        self.steps.append(Operation(torch.clone, (value,), {}, (before,)))
        return before, self._tape.remember(own)

    def _undoes_autocast(self, func: Function, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a function casts an output in half precision to the parameters' own dtype."""
        return (
            self.mixed
            and func in _CASTS
            and self._tape.index(args[0]) is not None
            and args[0].dtype in HALF
            and result.dtype == self._dtype
        )

    def _on_loss(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == functional.mse_loss and not self._depth:
            args, kwargs = self._as_residual(args, kwargs)
        outputs = loss_input(args, kwargs)
        if self._broadcasts(func, args, kwargs, outputs):
            READERS[func](
                *args, **kwargs
            )  # an error with a remedy, before torch warns of a line in here
        result = func(*args, **kwargs)
        if not (torch.is_grad_enabled() and outputs.requires_grad):
            return result
        if self._depth:
            index = self._tape.remember(outputs, known=False)
            self._inside.append(index)
        elif (known := self._tape.index(outputs)) is not None:
            index = known
        else:
            return result  # about what the model has not computed, or what can't be done again
        if outputs.numel() == 0:
            raise TargetError(
                f"KFAC needs at least one example to take a step from; {func.__name__} is called with "
                f"outputs of shape {tuple(outputs.shape)}. Leave out empty mini-batches."
            )
        plain_args, plain_kwargs = map_leaves((args, kwargs), as_plain)
        terms = READERS[func](*plain_args, **plain_kwargs)
        self._watch(terms.targets)
        declared = func is observe
        loss = None if declared else as_plain(result)

        def put(leaf: Any) -> Any:
            return Ref(index) if leaf is outputs else leaf

        given = map_leaves(map_leaves((args, kwargs), put), as_plain)
        given_args, given_kwargs = self._in_full(given)
        call = LossCall(index, terms, None, None if declared else func, given_args, given_kwargs)
        # A copy: the closure may go on with the loss in place.
        seen = SeenLoss(call, None if loss is None else loss.detach().clone(), next(self._indices))
        self._tape.lost([t for t in tensors_of((args, kwargs)) if t is not outputs])
        seen.outside = {
            id(t): t.shape
            for t in self._tape.outside.values()
            # Inputs that derivatives are taken by may reach the model in parts.
            if id(t) not in self._inputs and not (t.dim() and len(t) in self._rows)
        }
        self.losses.append(seen)
        tensor, arrive = outputs if loss is None else result, self._arrive
        if (
            tensor.grad_fn is not None
        ):  # not the recording itself: what holds on to the hook is the graph
            tensor.register_hook(lambda gradient: arrive(seen, gradient))
        return result

    # ----------------------------------------------------------------------------------------- values

    def _broadcasts(self, func: Function, args: Any, kwargs: Any, outputs: Tensor) -> bool:
        """Whether targets of another shape than the outputs are broadcast, in a call that is recorded."""
        target = args[1] if len(args) > 1 else kwargs.get("target")
        if func not in _BROADCASTING or not isinstance(target, Tensor):
            return False
        recorded = self._depth > 0 or self._tape.index(outputs) is not None
        differ = target.shape != outputs.shape
        return recorded and differ and torch.is_grad_enabled() and outputs.requires_grad

    def _as_residual(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of a squared error; if its targets are learned too, the outputs are the difference."""
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        z, target = given.pop("input"), given.pop("target")
        if self._tape.index(target) is None or not target.requires_grad:
            return args, kwargs
        with self:
            residual = z - target
        return (residual, torch.zeros_like(residual), *args[2:]), given

    def _watch(self, values: Any) -> None:
        """Remember the versions of these tensors, to find out whether they were written to."""
        self.versions += [(t, t._version) for t in tensors_of(values) if not t.is_inference()]

    def _in_full(self, values: Any) -> Any:
        """Values without a graph, and none in half precision: without autocast the model takes no such."""
        dtype = self._dtype if self.mixed else None

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf if leaf.is_leaf else leaf.detach()
            return leaf.to(dtype) if dtype is not None and leaf.dtype in HALF else leaf

        return map_leaves(values, convert)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return next(p.dtype for p in self.model.parameters() if p.requires_grad)

    # ------------------------------------------------------------------------------------- the result

    def record(self, number: int = 0) -> Record:
        """Its steps, after those of the earlier calls that it depends on."""
        steps = joined(self.sources, self.steps)
        versions = [v for source in self.sources for v in source.versions] + self.versions
        return Record(steps, versions, self._tape.shapes, self.mixed, number, bool(self.losses))

    def batch(self) -> Batch:
        """The mini-batch of a closure.

        Raises:
            ClosureError: the model was not called, or its inputs were changed afterwards.
        """
        if not (self.losses or any(isinstance(step, ModelCall) for step in self.steps)):
            raise ClosureError(
                f"The closure never called the model ({type(self.model).__name__}) with gradients "
                "enabled, so there is nothing to take a step from. Call the model that KFAC was "
                "given, in the closure."
            )
        whole = self.record()
        for seen in self.losses:
            seen.records = [whole]
        changed = ClosureError(
            "The closure changed inputs or targets in place after it had called the model with them, "
            "but KFAC goes through the same examples again. Use a new tensor for every call."
        )
        batch = assemble(self.losses, [whole], self.objective, changed)
        assert batch is not None
        return batch


@contextmanager
def record(
    model: nn.Module, objective: Objective, buffers: Buffers | None = None
) -> Iterator[Recording]:
    """Record everything that this thread does with the model and losses, inside this context.

    `buffers` are those of the model, or of the module inside it if it is compiled.
    """
    own: nn.Module = getattr(model, "_orig_mod", model)
    recording = Recording(model, objective, Buffers(own) if buffers is None else buffers)
    with ExitStack() as stack:
        for path, module in _modules(model):
            before = partial(recording.before_model, path)
            after = partial(recording.after_model, path)
            for handle in (
                # Before other hooks, which may change what the module is given: they will do so again.
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(instead_of_checkpoints(not_reentrant))
        stack.enter_context(recording)
        yield recording


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module is compiled."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model and the modules in it that have something to train, each once.

    Not those inside of compiled ones, which a hook would make the compiler compile again.
    """
    seen: set[nn.Module] = set()
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        if is_compiled(module):
            continue
        stack += [
            (f"{path}.{name}" if path else name, child)
            for name, child in module.named_children()
            if not isinstance(child, torch.jit.ScriptModule)
            and any(p.requires_grad for p in child.parameters())
        ]
