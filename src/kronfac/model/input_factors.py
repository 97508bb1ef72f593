"""What weights are multiplied with, seen in the user's own forward passes: A = E[a aᵀ] over a sample.

While an `InputObserver` is armed, the outermost call of a module enters a mode that sees torch functions
(`functions.py`). It leaves every result as it is. Calls without gradients (evaluation) and calls inside of
a backward pass (gradient checkpoints) are ignored. A compiled module runs undisturbed; its inputs then go
through one eager pass without gradients.
"""

import re
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import set_stance
from torch.nn import functional

from kronfac.curvature import Inputs
from kronfac.linalg.kronecker import add_gram
from kronfac.model.functions import OBSERVERS, Function, SeeFunctions
from kronfac.model.layout import PLAIN, Arrange, Layout
from kronfac.model.nested import tensors_of
from kronfac.model.network import MatrixLayout
from kronfac.model.registry import Layer, adapter_for
from kronfac.model.side_effects import (
    RandomState,
    device_of,
    eager_modules,
    full_precision,
    is_compiled,
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


AS_IT_IS = MatrixLayout()
Factors = Sequence[tuple[Tensor | None, Any]]
"""Parameters, and what each is multiplied with."""


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
    """A tensor that a layer has computed, perhaps reshaped since."""

    tensor: Tensor
    weight: int
    """The id of the layer's weight."""
    features_last: bool
    """Whether its last dimension is the layer's features, all of them."""


class _Record:
    """What one forward pass shows of every weight: the part of `Uses` that observers of functions call.

    Args:
        observer: has the weights to look for, and how many of their inputs are a sample.
    """

    def __init__(self, observer: "InputObserver") -> None:
        self._observer = observer
        self.found: defaultdict[int, Seen] = defaultdict(Seen)
        self.outputs: dict[int, _Output] = {}
        """By the ids of tensors."""

    def knows(self, value: Any) -> bool:
        """Whether this is a parameter that is looked for."""
        return id(value) in self._observer.weights

    def swapped(self, weight: Tensor) -> bool:
        """Whether a parameter is stored as (in, out / groups, …)."""
        return bool(self._stored(weight).transposed)

    def product(self, outputs: Tensor, factors: Factors, layout: Layout = PLAIN) -> None:
        """outputs = Σ_p P x_p."""
        for p, x in factors:
            if p is not None and x is not None:
                self._add(p, self._stored(p), x, outputs, layout)

    def transposed(self, outputs: Tensor, weight: Tensor, x: Tensor) -> None:
        """outputs = Pᵀ x."""
        self._add(weight, MatrixLayout(1), x, outputs)

    def grouped(self, outputs: Tensor, factors: Factors, arrange: Arrange) -> None:
        """outputs = Σ_p P x_p for rows in groups, with x_p (groups, examples, places, columns)."""
        for p, x in factors:
            if p is not None and x is not None:
                stored = MatrixLayout(int(self.swapped(p)), groups=len(x))
                self._add(p, stored, x, outputs, Layout(arrange))

    def lookup(self, outputs: Any, weight: Any, *ignored: Any) -> None:
        """outputs = Pᵀ e_i for indices i."""
        if self.knows(weight):
            self.found[id(weight)].lookup = True

    def elementwise(self, *ignored: Any) -> None:
        """What multiplies numbers one by one has no A."""

    def _stored(self, p: Tensor) -> MatrixLayout:
        return self._observer.layouts.get(id(p), AS_IT_IS)

    @torch.no_grad()
    def _add(
        self, p: Tensor, stored: MatrixLayout, x: Any, outputs: Tensor, layout: Layout = PLAIN
    ) -> None:
        """Add one product of a weight with inputs x, and Σ a aᵀ over a sample of them."""
        if not self.knows(p):
            return
        new = Seen(stored, x.shape[:-1].numel() // stored.groups)
        if id(p) in self._observer.wanted and new.rows:
            with full_precision(p.device):
                a = self._sample(x, layout.counts, stored.groups).to(precise(p.dtype))
                new.gram = torch.stack([add_gram(None, each, 0.0, 1.0) for each in a])
            new.sampled = a.shape[1]
        self.found[id(p)].merge(new)
        self.outputs[id(outputs)] = _Output(outputs, id(p), layout.arrange is None)

    def _sample(self, x: Tensor | Inputs, counts: Tensor | None, groups: int) -> Tensor:
        """Return evenly spaced vectors of the inputs, (groups, vectors, columns)."""
        limit, turn = self._observer.rows, self._observer.turn
        if not isinstance(x, Tensor):  # patches, which are cut out of some of the examples
            if limit is not None:
                examples, places, _ = x.shape
                few = min(examples, -(-4 * limit // max(places, 1)))
                start = turn * few % (examples - few + 1)
                x = x.select(slice(start, start + few)).rows()
            x = x if isinstance(x, Tensor) else x.all()
        x = x.detach()
        flat = (x if counts is None else x[counts]).reshape(groups, -1, x.shape[-1])
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
        """Follow the output of a product through a reshape, and notice if it is split."""
        x, seen = known.tensor, self.record.found[known.weight]
        if known.features_last and (seen.layout.groups, seen.layout.parts) == (1, 1):
            seen.layout = seen.layout._replace(parts=_parts(name, x, result))
        for tensor in tensors_of(result):
            joined = name in ("view", "reshape") and tensor.shape[-1:] == x.shape[-1:]
            last = known.features_last and (joined or tensor.shape == x.shape)
            after = _Output(tensor, known.weight, last)
            self.record.outputs.setdefault(id(tensor), after)

    def note_outputs(self, outputs: Any) -> None:
        """Note the weights whose products are what the model returns."""
        if isinstance(outputs, Mapping):  # of Hugging Face: keys and values are no predictions
            outputs = {name: x for name, x in outputs.items() if name != "past_key_values"}
        for tensor in tensors_of(outputs):
            if (known := self.record.outputs.get(id(tensor))) is not None:
                self.record.found[known.weight].head = True


def _parts(name: str, x: Tensor, result: Any) -> int:
    """Return into how many equal parts the features of x are split: q, k and v, gates, or 1 for none."""
    if name in ("chunk", "split"):
        sizes = [part.shape[-1] for part in result]
        return len(sizes) if sizes == [x.shape[-1] // len(sizes)] * len(sizes) else 1
    before = result.shape[: x.dim() - 1] if isinstance(result, Tensor) else None
    if name in ("view", "reshape", "unflatten") and before == x.shape[:-1]:
        after = result.shape[x.dim() - 1 :]  # (3, heads, features) in place of the features
        return 3 if len(after) == 3 and after[0] == 3 else 1
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
        self.found: dict[int, Seen] = {}
        """What forward passes have shown since it was armed, by ids of weights."""
        self._handles: list[Any] = []
        self._call: tuple[nn.Module, int, _Mode, ExitStack] | None = None
        """The outermost call under way: its module and thread, what it shows, and what it has entered."""

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
        for _, module in eager_modules(self.model):
            self._handles += register_hooks(module, self._before, self._after)

    def disarm(self) -> dict[int, Seen]:
        """See no more, and return what was seen."""
        remove_hooks(self._handles)
        if self._call is not None:  # an interrupt has ended a forward pass without its hooks
            self._call[-1].close()
        found, self.found, self._handles, self._call = self.found, {}, [], None
        self.weights, self.layouts = {}, {}
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._call is not None or in_backward or not torch.is_grad_enabled():
            return
        mode, context = _Mode(self), ExitStack()
        if not _compiled(module):
            context.enter_context(mode)
        self._call = module, threading.get_ident(), mode, context

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """A forward hook, called also if the forward pass failed."""
        if self._call is None or self._call[:2] != (module, threading.get_ident()):
            return
        (_, _, mode, context), self._call = self._call, None
        context.close()
        if not any(tensor.requires_grad for tensor in tensors_of(outputs)):
            return
        if _compiled(module):  # the compiler would trace the mode: its own code once more, without
            with torch.no_grad(), without_traces(module), set_stance("force_eager"), mode:
                outputs = getattr(module, "_orig_mod", module)(*args, **kwargs)
        mode.note_outputs(outputs)
        for key, new in mode.record.found.items():
            self.found.setdefault(key, Seen()).merge(new)


def _compiled(module: nn.Module) -> bool:
    """Whether a module, or one inside of it, is compiled."""
    return any(map(is_compiled, module.modules()))
