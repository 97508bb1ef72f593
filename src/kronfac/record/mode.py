"""Calls of the model, operations on its outputs and loss calls, recorded while they run.

A `TorchFunctionMode`, which affects this thread alone, sees loss functions and operations on the model's
outputs or with its parameters; hooks on the model and the modules in it see its calls. The factor of a loss
in the objective is the gradient that arrives at it in the backward pass. A closure is recorded as a whole
(`closure.py`); in a loop, each call of the model and of the loss (`recorder.py`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

from kronfac.errors import ClosureError, TargetError
from kronfac.model.nested import Ref, as_plain, map_leaves, tensors_of
from kronfac.model.own_pass import mixed
from kronfac.model.side_effects import Buffers, Kept, RandomState, device_of
from kronfac.objective import JOINED, READERS, Objective, observe
from kronfac.record.batch import HALF, Function, LossCall, ModelCall, Operation, Step, loss_input
from kronfac.record.losses import Record, SeenLoss, joined

_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CASTS = {torch.Tensor.float, torch.Tensor.double, torch.Tensor.to, torch.Tensor.type}
_GRADIENT = getattr(torch.Tensor.grad, "__get__")  # noqa: B009


class Recording(TorchFunctionMode):
    """Records a closure, or one call of the model or of the loss.

    Args:
        model: the model.
        objective: the loss that KFAC was given.
        buffers: the model's.
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
        self.mixed = False
        self._versions: list[tuple[Tensor, int]] = []
        self._buffers, self._kept = buffers, list[Kept]()
        self._indices = count() if indices is None else indices
        self._arrive = arrive
        self._mode = mode
        self._tape = Tape(model, self._indices)
        self._wrote = ""  # the function that has written to outputs in place
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

    def recognize(self, tensor: Tensor, index: int, source: Record, steps: Sequence[Step]) -> None:
        """Know a tensor by the earlier call, and the steps after it, that have computed it."""
        self._tape.recognize(tensor, index)
        self.steps += steps
        self.sources.append(source)

    def record(self, number: int = 0) -> Record:
        """Its steps, after the earlier calls that it depends on."""
        sources = sorted(self.sources, key=lambda source: source.number)
        versions = [v for source in sources for v in source.versions] + self._versions
        own = Record(self.steps, versions, self.mixed, number, bool(self.losses))
        own.steps = joined([*sources, own])
        return own

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
        inputs = tensors_of((args, kwargs))
        if torch.is_grad_enabled():
            self._refuse_written(inputs)
        self._inside = []
        self._given = self._tape.references((args, kwargs))[0]
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
            shapes=tuple(tensor.shape for tensor in tensors),
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
        """Call a function of known tensors, and record it unless it can't be repeated."""
        before = tensors_of((args, kwargs))
        versions = [tensor._version for tensor in before]
        lost = self._tape.lost(before)
        random = RandomState.current(self._device)
        result = func(*args, **kwargs)
        tensors = tensors_of(result)
        changed = [t for t, v in zip(before, versions, strict=True) if t._version != v]
        if any(tensor.requires_grad for tensor in changed):
            self._wrote = getattr(func, "__name__", str(func))
        if changed or lost or not (known or any(tensor.requires_grad for tensor in tensors)):
            return result
        if self.mixed and func in _CASTS and result.dtype == self._dtype:
            index = self._tape.index(args[0])
            if index is not None and args[0].dtype in HALF:
                # Without autocast there is nothing to cast: to the same index.
                self._tape.recognize(result, index)
                return result
        if tensors:
            drew = not random.same_as(RandomState.current(self._device))
            given_args, given_kwargs = map_leaves(given, as_plain)
            indices = tuple(map(self._tape.remember, tensors))
            random_before = random if drew else None
            step = Operation(func, given_args, given_kwargs, indices, random_before)
            self.steps.append(step)
        return result

    def _on_loss(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a loss function, and record it if its outputs are known or the model calls it."""
        if func == functional.mse_loss and not self._depth:
            args, kwargs = self._as_residual(args, kwargs)
        outputs = loss_input(args, kwargs)
        index = self._tape.index(outputs)
        if not (torch.is_grad_enabled() and outputs.requires_grad):
            return func(*args, **kwargs)
        if self._depth:
            index = self._tape.remember(outputs, known=False)
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
        declared = func is observe
        loss = None if declared else as_plain(result)

        def put(leaf: Any) -> Any:
            return Ref(index) if leaf is outputs else as_plain(leaf)

        given_args, given_kwargs = self._in_full(map_leaves((args, kwargs), put))
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
        if tensor.grad_fn is not None:
            # Not a method: the graph, which holds on to the hook, would keep the recording.
            tensor.register_hook(lambda gradient: arrive(seen, gradient))
        return result

    def _as_residual(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments of a squared error; if its targets are learned too, the outputs are the difference."""
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        z, target = given.pop("input"), given.pop("target")
        if self._tape.index(target) is None or not target.requires_grad:
            return args, kwargs
        with self:
            residual = z - target
        return (residual, torch.zeros_like(residual), *args[2:]), given

    # ----------------------------------------------------------------------------------------- values

    def _refuse_written(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors that were computed by writing to the model's outputs in place."""
        if self._wrote and self._tape.lost(tensors):
            raise ClosureError(
                "KFAC repeats what was done between the model and the loss, but it can't repeat writes in "
                f"place; it got outputs that {self._wrote} has written to. Compute a new tensor instead, "
                "for example by torch.where, masked_fill, torch.cat or torch.stack."
            )

    def _watch(self, values: Any) -> None:
        """Remember the versions of these tensors, to find out whether they were written to."""
        self._versions += [(t, t._version) for t in tensors_of(values) if not t.is_inference()]

    def _in_full(self, values: Any) -> Any:
        """Values without a graph, and none in half precision, which K-FAC's own passes don't take."""

        def convert(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf if leaf.is_leaf else leaf.detach()
            return leaf.to(self._dtype) if self.mixed and leaf.dtype in HALF else leaf

        return map_leaves(values, convert)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of the trained parameters."""
        return next(p.dtype for p in self.model.parameters() if p.requires_grad)


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module is compiled."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


# -------------------------------------------------------------------------------------- known tensors

_TAPES = count()
_NODE_KEY = "kronfac.tape"
"""Under which the nodes of the graph keep the indices of the tensors that they computed."""


class Tape:
    """The tensors that recorded steps have computed, by their indices.

    They are known for as long as the closure holds on to them: weak references keep no graph and no
    activations. A tensor that was written to is no longer known.

    `as_subclass`, and the constructor of a class of tensors, make an alias of a tensor without calling a
    `TorchFunctionMode`. The alias is found by its node of the graph, `AliasBackward0`, which leads to the
    tensor's own node, whether that tensor still exists or not.
    """

    def __init__(self, model: nn.Module, indices: Iterator[int]) -> None:
        self._indices = indices
        self._trained = {id(p) for p in model.parameters() if p.requires_grad}
        self.outside: dict[int, Tensor] = {}
        """Leaves that require a gradient and are not the model's, by id."""
        self._known: Any = WeakTensorKeyDictionary()
        self._number = next(_TAPES)

    def remember(self, tensor: Tensor, known: bool = True) -> int:
        """A new index; with `known`, the tensor is found by it from now on."""
        index = next(self._indices)
        if known:
            self.recognize(tensor, index)
        return index

    def recognize(self, tensor: Tensor, index: int) -> None:
        """Know a tensor by an index that was given out elsewhere."""
        self._known[tensor] = entry = (index, tensor._version)
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_NODE_KEY, {})[self._number, tensor.output_nr] = entry

    def index(self, leaf: Any) -> int | None:
        """The index of a tensor; None if it is not known, or was written to since."""
        if not isinstance(leaf, Tensor):
            return None
        entry = self._known.get(leaf) or self._entry_of_alias(leaf)
        return None if entry is None or entry[1] != leaf._version else entry[0]

    def _entry_of_alias(self, tensor: Tensor) -> tuple[int, int] | None:
        """The entry of a known tensor that this one is an alias of, which is then known too."""
        with torch._C.DisableTorchFunction():  # the class may have a `grad_fn` of its own
            node: Any = tensor.grad_fn
        while node is not None and node.name() == "AliasBackward0":
            node, number = node.next_functions[0]
            entries = {} if node is None else node.metadata.get(_NODE_KEY, {})
            entry: tuple[int, int] | None = entries.get((self._number, number))
            if entry is not None:
                self._known[tensor] = entry
                return entry
        return None

    def references(self, given: Any) -> tuple[Any, bool, bool]:
        """Arguments with references to known tensors; whether there is any, or a trained parameter."""
        known = trained = False

        def put(leaf: Any) -> Any:
            nonlocal known, trained
            index = self.index(leaf)
            if index is None:
                trained = trained or id(leaf) in self._trained
                return leaf
            known = True
            return Ref(index)

        return map_leaves(given, put), known, trained

    def lost(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors was computed from trained parameters by something unknown.

        Leaves outside the model that they were computed from are noted.
        """
        unknown = [t for t in tensors if self.index(t) is None]
        leaves = [t for t in unknown if t.requires_grad and t.is_leaf]
        visited: set[Any] = set()
        stack: list[Any] = [t.grad_fn for t in unknown if t.grad_fn is not None]
        lost = False
        while stack and not lost:
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            leaf = getattr(node, "variable", None)
            lost = id(leaf) in self._trained
            if leaf is not None:
                leaves.append(leaf)
            stack.extend(parent for parent, _ in node.next_functions)
        self.outside.update({id(t): t for t in leaves if id(t) not in self._trained})
        return lost
