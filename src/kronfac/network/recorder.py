"""What the closure did with the model and the loss, recorded while it runs.

The closure makes its own forward and backward passes; K-FAC's passes (statistics, Fisher products, ρ) run
over the same examples afterwards. A `TorchFunctionMode`, which is this thread's alone, sees loss functions,
wherever they are called, and what was done to the model's outputs before; hooks on the model, which only
record and only what this thread does, see its calls. What a loss counts in the objective is the gradient
that arrives at it in the backward pass.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from kronfac.errors import ClosureError, UnsupportedLossError
from kronfac.network.assembly import declare, group
from kronfac.network.program import (
    Batch,
    Function,
    LossCall,
    ModelCall,
    Operation,
    Ref,
    loss_input,
    tensors_of,
)
from kronfac.network.side_effects import RandomState
from kronfac.objective import JOINED, READERS, Objective, observe
from kronfac.precision import mixed

HALF = (torch.float16, torch.bfloat16)
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CASTS = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.to, torch.Tensor.type}


@dataclass
class _Seen:
    """A loss call, and what arrives at it."""

    call: LossCall
    loss: Tensor | None
    arrived: Tensor | None = None


class Recording(TorchFunctionMode):
    """What the closure did, seen from inside it."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.steps: list[ModelCall | Operation] = []
        self.losses: list[_Seen] = []
        self.mixed = False
        self._thread = threading.get_ident()
        self._depth = 0
        self._suspended = ExitStack()
        self._random: RandomState | None = None
        self._inside: list[int] = []  # what the running call has called losses with
        self._next = 0
        self._known: dict[int, tuple[int, Tensor, int]] = {}  # by its id: index, tensor, version
        self._shapes: dict[int, torch.Size] = {}
        self._versions: list[tuple[Tensor, int]] = []

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
        self._inside = []
        if hasattr(module, "_orig_mod"):  # the compiler would trace this mode
            self._suspended.enter_context(_pop_mode_temporarily())
        self._random = RandomState.current(_device(module))

    def after_model(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        """A forward hook, called also if the forward pass failed."""
        if threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth > 0:
            return
        self._suspended.close()
        tensors = tensors_of(outputs)
        if not any(tensor.requires_grad for tensor in tensors):  # an evaluation on the side
            return
        device, before = tensors[0].device, self._random
        assert before is not None
        self.mixed = self.mixed or mixed(device)
        drew = not before.same_as(RandomState.current(_device(module)))
        self._watch((args, kwargs))
        call = ModelCall(
            self._in_full(args),
            self._in_full(kwargs),
            outputs=tuple(self._remember(tensor) for tensor in tensors),
            losses=tuple(self._inside),
            random=before if drew else None,
        )
        self.steps.append(call)

    # --------------------------------------------------------------------------------- torch functions

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See every torch function that this thread calls."""
        kwargs = kwargs or {}
        if func in JOINED:
            with self:
                return JOINED[func](self._depth > 0, *args, **kwargs)
        if func in READERS:
            return self._on_loss(func, args, kwargs)
        if self._depth or not self._known:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            self._known.clear()  # what follows is about another micro-batch
            return func(*args, **kwargs)
        # Before it is called: it may write to its arguments.
        given = self._references((args, kwargs))
        constants = _versions(given)
        result = func(*args, **kwargs)
        if constants != _versions(given):
            return result  # it wrote to a tensor of the closure's own: once is enough
        if given is not None and self._undoes_autocast(func, args, result):
            # Without autocast there is nothing to undo.
            self._known[id(result)] = (self._known[id(args[0])][0], result, result._version)
        elif given is not None and (tensors := tensors_of(result)):
            indices = tuple(self._remember(tensor) for tensor in tensors)
            self.steps.append(Operation(func, given[0], given[1], indices))
        return result

    def _undoes_autocast(self, func: Function, args: tuple[Any, ...], result: Any) -> bool:
        """Whether a function casts an output in half precision to the parameters' own dtype."""
        return (
            self.mixed
            and func in _CASTS
            and id(args[0]) in self._known
            and args[0].dtype in HALF
            and result.dtype == self._dtype
        )

    def _on_loss(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = loss_input(args, kwargs)
        result = func(*args, **kwargs)
        if not (torch.is_grad_enabled() and outputs.requires_grad):
            return result
        if self._depth:
            index = self._remember(outputs, known=False)
            self._inside.append(index)
        elif (known := self._index(outputs)) is not None:
            index = known
        else:
            return (
                result  # about something that the model has not computed, or that can't be replayed
            )
        terms = READERS[func](*args, **kwargs)
        self._watch(terms.targets)
        declared = func is observe
        loss = None if declared else result

        def put(leaf: Any) -> Any:
            return Ref(index) if leaf is outputs else self._in_full(leaf)

        given_args, given_kwargs = pytree.tree_map(put, (args, kwargs))
        call = LossCall(index, terms, None, None if declared else func, given_args, given_kwargs)
        # A copy: the closure may go on with the loss in place.
        seen = _Seen(call, None if loss is None else loss.detach().clone())
        self.losses.append(seen)
        if loss is not None and loss.requires_grad:

            def arrived(gradient: Tensor) -> None:
                seen.arrived = gradient if seen.arrived is None else seen.arrived + gradient

            loss.register_hook(arrived)
        return result

    # ----------------------------------------------------------------------------------------- values

    def _remember(self, tensor: Tensor, known: bool = True) -> int:
        index = self._next
        self._next += 1
        self._shapes[index] = tensor.shape
        if known:
            # Itself, so that its id is not used again.
            self._known[id(tensor)] = (index, tensor, tensor._version)
        return index

    def _index(self, leaf: Any) -> int | None:
        """The index of a recorded tensor, unless it was written to since by what could not be recorded."""
        entry = self._known.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return None if entry is None or entry[2] != leaf._version else entry[0]

    def _references(self, given: Any) -> Any:
        """The arguments with references to what was recorded; None if there is none among them."""
        found = False

        def put(leaf: Any) -> Any:
            nonlocal found
            index = self._index(leaf)
            if index is None:
                return leaf
            found = True
            return Ref(index)

        replaced = pytree.tree_map(put, given)
        return replaced if found else None

    def _watch(self, values: Any) -> None:
        """Remember the versions of these tensors, to find out whether they were written to."""
        self._versions += [
            (leaf, leaf._version) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)
        ]

    def _in_full(self, values: Any) -> Any:
        """Tensors in half precision as the parameters are: without autocast the model takes no others."""
        if not self.mixed:
            return values
        dtype = self._dtype
        return pytree.tree_map(
            lambda leaf: leaf.to(dtype) if getattr(leaf, "dtype", None) in HALF else leaf, values
        )

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
        if not any(isinstance(step, ModelCall) for step in self.steps):
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
        losses = [loss for loss in map(_with_factor, self.losses) if loss is not None]
        if not losses:
            declared = declare(self.steps, self._shapes, self.objective)
            return Batch(declared, seen=False, mixed=self.mixed)
        seen = all(loss.function is not None for loss in losses)
        return Batch(group(self.steps, losses), seen=seen, mixed=self.mixed)


@contextmanager
def record(model: nn.Module, objective: Objective) -> Iterator[Recording]:
    """Record what this thread does with the model, inside this context."""
    recording = Recording(model, objective)
    handles = [
        model.register_forward_pre_hook(recording.before_model, with_kwargs=True),
        model.register_forward_hook(recording.after_model, with_kwargs=True, always_call=True),
    ]
    try:
        with recording:
            yield recording
    finally:
        for handle in handles:
            handle.remove()


def _versions(given: Any) -> list[int]:
    """The versions of the tensors among the arguments that were not recorded."""
    return [leaf._version for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]


def _with_factor(seen: _Seen) -> LossCall | None:
    """The call with what it counts in the objective; None if nothing arrived at it."""
    if seen.loss is None:
        return seen.call
    if seen.arrived is None:
        return None
    factor: float | Tensor = seen.arrived
    if not seen.arrived.is_cuda:
        least = float(seen.arrived.min())
        if seen.arrived.dim() == 0:
            factor = least
        if least < 0:
            raise UnsupportedLossError(
                "KFAC needs losses that are minimised; one of those that the closure called enters its "
                f"objective with the factor {least:g}, which has no positive curvature. Leave it out, or "
                "declare the terms that are minimised with kronfac.observe."
            )
    terms = seen.call.terms
    # A loss without a reduction: how it is reduced is what arrives at each of its elements.
    own = terms.weighed_by(seen.arrived) if seen.arrived.dim() else terms.scaled(factor)
    value = (seen.loss * seen.arrived).sum()
    return replace(seen.call, terms=own, value=value, factor=factor)


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
