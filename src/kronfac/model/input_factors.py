"""What weights are multiplied with, seen in the user's own forward passes: A = E[a aᵀ] over a sample.

While an `InputObserver` is armed, the outermost call of a module enters a mode that sees torch functions
(`functions.py`). It leaves every result as it is. Calls without gradients (evaluation) and calls inside of
a backward pass (gradient checkpoints) are ignored. A compiled module runs undisturbed; its inputs then go
through one eager pass without gradients.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import _pop_mode_temporarily

from kronfac.curvature import Inputs
from kronfac.linalg.spd import add_gram
from kronfac.model.functions import OBSERVERS, Function, SeeFunctions
from kronfac.model.layout import PLAIN, Arrange, Layout
from kronfac.model.nested import tensors_of
from kronfac.model.own_pass import full_precision
from kronfac.model.registry import Layer, adapter_for
from kronfac.model.side_effects import (
    RandomState,
    device_of,
    register_hooks,
    remove_hooks,
    replay,
    without_traces,
)

GATES: dict[type[nn.Module], int] = {
    nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.MultiheadAttention: 3,
}  # fmt: skip
"""Modules whose packed weights are several matrices, one below the other."""
PACKED = ("weight_ih", "weight_hh", "in_proj_weight")
_PLAIN, _COMPOSITE = ("linear", "convolution", "bilinear"), ("attention", "recurrent")
"""Files of observers that call the function itself, and of those that compute it step by step, which the
user's own pass does not. Others have no products of matrices."""
_LOOKUPS: set[Any] = {functional.embedding, functional.embedding_bag}
_RESHAPES = re.compile(
    "view|view_as|reshape|reshape_as|flatten|unflatten|squeeze|unsqueeze|transpose|permute|movedim|t|__get__|"
    "contiguous|clone|to|float|double|__getitem__|chunk|split|unbind|select|(log_)?softmax|sigmoid"
)
"""Functions after which outputs of a layer still count as such: reshapes, casts, probabilities."""


class MatrixLayout(NamedTuple):
    """How a parameter is read as matrices, (matrices, rows, columns), each multiplied with vectors a."""

    transposed: int = 0
    """1 if it is stored as (in, out / groups, …), and not as (out, in / groups, …)."""
    groups: int = 1
    """Groups of rows with inputs of their own, as in grouped convolutions."""
    parts: int = 1
    """Packed matrices with the same inputs, such as queries, keys and values, or the gates of an LSTM."""

    def split(self, t: Tensor) -> Tensor:
        """Return (matrices, rows, columns) from a tensor in the parameter's shape."""
        if self.transposed:
            t = t.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return t.reshape(self.groups * self.parts, len(t) // (self.groups * self.parts), -1)

    def join(self, X: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor in the parameter's shape from (matrices, rows, columns)."""
        if not self.transposed:
            return X.reshape(shape)
        apart = X.reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return apart.transpose(1, 2).reshape(shape)

    def size(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the numbers of matrices, rows and columns for a parameter of this shape."""
        rows = self.groups * shape[1] if self.transposed else shape[0]
        return self.groups * self.parts, rows // (self.groups * self.parts), shape.numel() // rows


AS_IT_IS = MatrixLayout()


@dataclass
class Seen:
    """What forward passes have shown of one weight."""

    layout: MatrixLayout = AS_IT_IS
    rows: int = 0
    """Vectors that it was multiplied with."""
    lookup: bool = False
    """Whether rows of it were looked up, as in an embedding."""
    head: bool = False
    """Whether its products are outputs of the model."""
    gram: Tensor | None = None
    """Σ a aᵀ over a sample, (groups, columns, columns)."""
    sampled: int = 0
    """Vectors in the sample."""

    def merge(self, new: "Seen") -> None:
        """Add what another use, pass or process has shown."""
        first = not self.rows or (self.layout.transposed and not new.layout.transposed)
        if new.rows and first:  # a weight that is used both ways counts for its direct uses
            self.layout, self.gram, self.sampled = new.layout, None, 0
        self.rows += new.rows
        self.lookup, self.head = self.lookup or new.lookup, self.head or new.head
        if new.layout.transposed == self.layout.transposed:
            parts = max(self.layout.parts, new.layout.parts)
            self.layout = self.layout._replace(parts=parts)
            if new.gram is not None:
                self.gram = new.gram if self.gram is None else self.gram + new.gram
                self.sampled += new.sampled


def precise(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an optimizer's state for parameters of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Output(NamedTuple):
    """What is known of a tensor that layers have computed."""

    tensor: Tensor
    weights: set[int]
    """Ids of the layers' weights."""
    feature: int
    """Its dimension of features, from the end; 0 if that is not known."""


class _Record:
    """What one forward pass shows of every weight: the part of `Uses` that observers of functions call.

    Args:
        observer: has the weights to look for, and how many of their inputs are a sample.
    """

    def __init__(self, observer: "InputObserver") -> None:
        self._observer = observer
        self.found: dict[int, Seen] = {}
        self.outputs: dict[int, _Output] = {}
        """By the ids of tensors."""

    def knows(self, value: Any) -> bool:
        """Whether this is a parameter that is looked for."""
        return id(value) in self._observer.weights

    def swapped(self, weight: Tensor) -> bool:
        """Whether a parameter is stored as (in, out / groups, …)."""
        return bool(self._observer.layouts.get(id(weight), AS_IT_IS).transposed)

    def product(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Any]],
        layout: Layout = PLAIN,
        source: Tensor | None = None,
    ) -> None:
        """outputs = Σ_p P x_p."""
        for p, x in factors:
            if p is not None and x is not None and self.knows(p):
                stored = self._observer.layouts.get(id(p), AS_IT_IS)
                vectors = layout.arranged(outputs.detach())[..., 0].numel()
                self._add(p, stored, x, vectors, layout.counts)
                convolved = 1 - p.dim() if p.dim() > 2 else 0
                feature = -1 if layout.arrange is None else convolved
                self.outputs[id(outputs)] = _Output(outputs, {id(p)}, feature)

    def transposed(self, outputs: Tensor, weight: Tensor, x: Tensor) -> None:
        """outputs = Pᵀ x."""
        if self.knows(weight):
            self._add(weight, MatrixLayout(1), x, x[..., 0].numel())
            self.outputs[id(outputs)] = _Output(outputs, {id(weight)}, -1)

    def lookup(self, outputs: Any, weight: Any, *ignored: Any) -> None:
        """outputs = Pᵀ e_i for indices i."""
        if self.knows(weight):
            self.found.setdefault(id(weight), Seen()).lookup = True

    def grouped(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Any]],
        arrange: Arrange,
        source: Tensor,
    ) -> None:
        """outputs = Σ_p P x_p for rows in groups, with x_p (groups, examples, places, columns)."""
        for p, x in factors:
            if p is not None and isinstance(x, Tensor) and self.knows(p):
                layout = MatrixLayout(int(self.swapped(p)), groups=len(x))
                self._add(p, layout, x, x[0, ..., 0].numel())

    def elementwise(self, *ignored: Any) -> None:
        """What multiplies numbers one by one has no A."""

    @torch.no_grad()
    def _add(
        self,
        p: Tensor,
        layout: MatrixLayout,
        x: Tensor | Inputs,
        vectors: int,
        counts: Tensor | None = None,
    ) -> None:
        """Add Σ a aᵀ over a sample of the inputs x of one product."""
        new = Seen(layout, vectors)
        if id(p) in self._observer.wanted and vectors:
            with full_precision(p.device):
                a = self._sample(x, counts, layout.groups).to(precise(p.dtype))
                new.gram = torch.stack([add_gram(None, each, 0.0, 1.0) for each in a])
            new.sampled = a.shape[1]
        self.found.setdefault(id(p), Seen()).merge(new)

    def _sample(self, x: Tensor | Inputs, counts: Tensor | None, groups: int) -> Tensor:
        """Return evenly spaced vectors of the inputs, (groups, vectors, columns)."""
        limit, turn = self._observer.rows, self._observer.turn
        if isinstance(x, Tensor):
            x = x.detach()
            flat = (x if counts is None else x[counts]).reshape(groups, -1, x.shape[-1])
        elif limit is None:
            flat = x.all().flatten(0, 1).unsqueeze(0)
        else:  # patches, which are cut out of some of the examples
            examples, places, _ = x.shape
            few = min(examples, -(-4 * limit // max(places, 1)))
            start = turn * few % (examples - few + 1)
            vectors = x.select(slice(start, start + few)).rows()
            flat = (vectors if isinstance(vectors, Tensor) else vectors.all()).unsqueeze(0)
        step = 1 if limit is None else max(flat.shape[1] // limit, 1)
        return flat[:, turn % step :: step]


class _Mode(SeeFunctions):
    """Sees the torch functions of one forward pass, and leaves their results as they are."""

    def __init__(self, observer: "InputObserver") -> None:
        self.record = _Record(observer)
        super().__init__(cast(Any, self.record), set())
        self._device = device_of(observer.model)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKUPS:
            self.record.lookup(None, kwargs.get("weight", args[1] if len(args) > 1 else None))
            return func(*args, **kwargs)
        observer = OBSERVERS.get(func)
        file = getattr(observer, "func", observer).__module__.rpartition(".")[2] if observer else ""
        if file in _PLAIN:
            return super().__torch_function__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        if file in _COMPOSITE:
            with torch.no_grad(), replay(RandomState.current(self._device)):
                super().__torch_function__(func, types, args, kwargs)
            return result
        self.follow(func, args, kwargs, result)
        name = getattr(func, "__name__", "")
        known = self.record.outputs.get(id(args[0])) if args else None
        if known is not None and _RESHAPES.fullmatch(name):
            self._pass_on(name, known, result)
        return result

    def _pass_on(self, name: str, known: _Output, result: Any) -> None:
        """Follow outputs of products through a reshape, and notice those that are split."""
        x = known.tensor
        for seen in map(self.record.found.__getitem__, known.weights):
            if (seen.layout.groups, seen.layout.parts) == (1, 1):
                parts = _parts(name, x, known.feature, result)
                seen.layout = seen.layout._replace(parts=parts)
        for tensor in tensors_of(result):
            same = tensor.shape == x.shape or (
                name in ("view", "reshape")
                and tensor.shape[-1:] == x.shape[-1:]
                and known.feature == -1
            )
            after = _Output(tensor, known.weights, known.feature if same else 0)
            self.record.outputs.setdefault(id(tensor), after)

    def note_outputs(self, outputs: Any) -> None:
        """Note the weights whose products are what the model returns."""
        if isinstance(outputs, Mapping):  # of Hugging Face: keys and values are no predictions
            outputs = {name: x for name, x in outputs.items() if name != "past_key_values"}
        for tensor in tensors_of(outputs):
            if (known := self.record.outputs.get(id(tensor))) is not None:
                for key in known.weights:
                    self.record.found[key].head = True


def _parts(name: str, x: Tensor, feature: int, result: Any) -> int:
    """Return into how many equal parts the features of x are split: q, k and v, gates, or 1 for none."""
    if not feature:
        return 1
    dim = x.dim() + feature
    if name in ("chunk", "split") and isinstance(result, (tuple, list)):
        sizes = {part.shape[dim] for part in result}
        return len(result) if len(sizes) == 1 and len(result) * max(sizes) == x.shape[dim] else 1
    if name in ("view", "reshape", "unflatten") and dim == x.dim() - 1:
        after = result.shape[dim:]  # (3, heads, features) in place of the features
        whole = len(after) == 3 and after.numel() == x.shape[-1]
        return 3 if whole and after[0] == 3 and result.shape[:dim] == x.shape[:dim] else 1
    return 1


class InputObserver:
    """Sees forward passes of a model while it is armed.

    Args:
        model: the module that the user gave; it may be compiled.
        rows: vectors that a sample has at the most, for each product; None for all of them.
    """

    def __init__(self, model: nn.Module, rows: int | None) -> None:
        self.model, self.rows, self.turn = model, rows, 0
        self.weights: dict[int, Tensor] = {}
        self.wanted: Collection[int] = ()
        self.layouts: dict[int, MatrixLayout] = {}
        """Of weights that are packed or stored as (in, out / groups, …), by id."""
        self.passes = 0
        """Forward passes that were seen since it was armed."""
        self.found: dict[int, Seen] = {}
        """What they have shown, by ids of weights."""
        self._handles: list[Any] = []
        self._open: list[tuple[nn.Module, ExitStack]] = []
        """The calls that are under way, the outermost first, and what they have entered."""
        self._mode: _Mode | None = None
        self._thread = 0

    @property
    def armed(self) -> bool:
        """Whether forward passes are seen."""
        return bool(self._handles)

    def arm(self, weights: Sequence[Tensor], wanted: Collection[int], turn: int) -> None:
        """See forward passes from now on.

        Args:
            weights: parameters to look for.
            wanted: ids of those whose Σ a aᵀ is taken.
            turn: counts up, so that other vectors are in the next sample.
        """
        self.disarm()
        self.weights, self.wanted, self.turn = {id(p): p for p in weights}, wanted, turn
        for module in self.model.modules():
            adapter = adapter_for(module)
            swapped = int(isinstance(adapter, Layer) and adapter.swapped(module) > 0)
            parts = next((n for kind, n in GATES.items() if isinstance(module, kind)), 1)
            for name, p in module._parameters.items() if swapped or parts > 1 else ():
                if p is not None and p.dim() > 1 and (swapped or name.startswith(PACKED)):
                    self.layouts[id(p)] = MatrixLayout(swapped, parts=parts)
        for module in _eager_modules(self.model):
            self._handles += register_hooks(module, self._before, self._after)

    def disarm(self) -> dict[int, Seen]:
        """See no more, and return what was seen."""
        remove_hooks(self._handles)
        while self._open:  # an interrupt has ended a forward pass without its hooks
            self._open.pop()[1].close()
        found, self.found, self.passes, self._handles = self.found, {}, 0, []
        self.weights, self.layouts, self._mode = {}, {}, None
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        outermost, compiled = not self._open, hasattr(module, "_orig_mod")
        if outermost:
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward or not torch.is_grad_enabled():
                return
            self._thread, self._mode = threading.get_ident(), _Mode(self)
        elif self._thread != threading.get_ident():
            return
        assert self._mode is not None
        context = ExitStack()
        if outermost and not compiled:
            context.enter_context(self._mode)
        elif compiled and not outermost:  # the compiler would trace the mode
            context.enter_context(_pop_mode_temporarily())
        self._open.append((module, context))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """A forward hook, called also if the forward pass failed."""
        mine = self._open and self._open[-1][0] is module
        if not mine or self._mode is None or self._thread != threading.get_ident():
            return
        mode, returned = self._mode, outputs
        self._open.pop()[1].close()
        if outputs is not None and hasattr(module, "_orig_mod"):
            returned = self._once_more(module._orig_mod, args, kwargs)
        elif outputs is not None and hasattr(adapter := adapter_for(module), "uses"):
            for use in adapter.uses(module, args, kwargs, outputs):  # type: ignore[union-attr]
                factors = [(module._parameters[name], x) for name, x in use.inputs.items()]
                mode.record.product(use.outputs, factors, Layout(use.arrange))
        if self._open:
            return
        self._mode = None
        if any(tensor.requires_grad for tensor in tensors_of(outputs)):
            mode.note_outputs(returned)
            self.passes += 1
            for key, new in mode.record.found.items():
                self.found.setdefault(key, Seen()).merge(new)

    def _once_more(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Run a compiled module's own code on its inputs, without a trace; return its outputs."""
        assert self._mode is not None
        with torch.no_grad(), without_traces(module), ExitStack() as context:
            if not self._open:
                context.enter_context(self._mode)
            return module(*args, **kwargs)


def _eager_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Return all modules but those inside of compiled ones, which hooks would make compile again."""
    stack, found = [model], set[nn.Module]()
    while stack:
        module = stack.pop()
        if module in found or isinstance(module, torch.jit.ScriptModule):
            continue
        found.add(module)
        yield module
        if not hasattr(module, "_orig_mod"):
            stack += list(module.children())
