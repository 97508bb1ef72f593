"""What the closure did with the model and the loss, recorded while it runs.

The closure makes its own forward and backward passes; K-FAC's passes (statistics, Fisher products, ρ) run
over the same examples afterwards. A `TorchFunctionMode`, which is this thread's alone, sees loss functions,
wherever they are called, and what was done to the model's outputs or with its parameters before; hooks on
the model and the modules in it, which only record and only what this thread does, see its calls. What a
loss counts in the objective is the gradient that arrives at it in the backward pass.
"""

import threading
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from kronfac.errors import ClosureError, TargetError
from kronfac.network.assembly import SeenLoss, declare, group
from kronfac.network.nested import Ref, map_leaves, tensors_of
from kronfac.network.program import (
    HALF,
    Batch,
    Function,
    LossCall,
    ModelCall,
    Operation,
    loss_input,
)
from kronfac.network.side_effects import Buffers, Kept, RandomState, device_of
from kronfac.network.subclasses import as_plain
from kronfac.network.tape import Tape, written_by
from kronfac.objective import JOINED, READERS, Objective, observe
from kronfac.precision import mixed

_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CASTS = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.to, torch.Tensor.type}
_GRADIENT = getattr(torch.Tensor.grad, "__get__")  # noqa: B009


class Recording(TorchFunctionMode):
    """What the closure did, seen from inside it."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        buffers: Buffers,
        tape: Tape | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self._buffers, self._kept = buffers, list[Kept]()
        self.steps: list[ModelCall | Operation] = []
        self.losses: list[SeenLoss] = []
        self.mixed = False
        self._tape = tape or Tape(model)
        self._thread = threading.get_ident()
        self._device = device_of(model)
        self._depth = 0  # of calls that run; a backward pass, which may repeat some, counts too
        self._suspended = ExitStack()
        self._random: RandomState | None = None
        self._given: Any = None  # what the running call was given
        self._inside: list[int] = []  # what the running call has called losses with
        self._versions: list[tuple[Tensor, int]] = []

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
        self._watch(self._given)
        self._suspend(module)
        self._random = RandomState.current(self._device)
        self._kept = self._buffers.before_call(path)

    def _suspend(self, module: nn.Module) -> None:
        if hasattr(module, "_orig_mod"):  # the compiler would trace this mode
            self._suspended.enter_context(_pop_mode_temporarily())

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
                return JOINED[func](self._depth > 0, *args, **kwargs)
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
        lost = self._tape.lost([t for t in before if self._tape.index(t) is None])
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
        seen = SeenLoss(call, None if loss is None else loss.detach().clone())
        self.losses.append(seen)
        self._await_gradient(outputs if loss is None else result, seen)
        return result

    def _await_gradient(self, tensor: Tensor, seen: SeenLoss) -> None:
        """Note what arrives at a loss, or at outputs that are declared, in the backward pass."""
        if seen.loss is not None and tensor.requires_grad:
            tensor.register_hook(seen.arrive)

    # ----------------------------------------------------------------------------------------- values

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
        self._versions += [(t, t._version) for t in tensors_of(values) if not t.is_inference()]

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

    def batch(self) -> Batch:
        """The mini-batch that was recorded.

        Raises:
            ClosureError: the model was not called, or its inputs were changed afterwards.
        """
        called = any(isinstance(step, ModelCall) for step in self.steps)
        if not (called or self.losses):
            raise ClosureError(
                f"The closure never called the model ({type(self.model).__name__}) with gradients "
                "enabled, so there is nothing to take a step from. Call the model that KFAC was "
                "given, in the closure."
            )
        if any(tensor._version != version for tensor, version in self._versions):
            raise ClosureError(
                "The closure changed inputs or targets in place after it had called the model with "
                "them, but KFAC goes through the same examples again. Use a new tensor for every call."
            )
        losses = [loss for seen in self.losses if (loss := seen.with_factor()) is not None]
        if not losses:
            declared = declare(self.steps, self._tape.shapes, self.objective)
            return Batch(declared, seen=False, assumed=True, mixed=self.mixed)
        seen = all(loss.function is not None for loss in losses)
        return Batch(group(self.steps, losses), seen=seen, mixed=self.mixed)
