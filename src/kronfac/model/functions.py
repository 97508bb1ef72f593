"""Torch functions that parameters are given to, and what they do with them.

A `TorchFunctionMode`, which is this thread's alone, sees them: another thread that evaluates the model
meanwhile is not seen, and sees nothing. A function's observer computes the same as the function and records
the uses of parameters in it. Functions that compute several products inside, such as attention, are run
step by step, so that each is seen. What a parameter goes through before it is used (slices, reshapes,
exponentials, anything of parameters alone) is followed: what results is *derived*.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kronfac.model.layout import PLAIN, Elementwise, Layout
from kronfac.model.nested import call_plainly, tensors_of
from kronfac.model.network import BY_CONVENTION, ExampleDims, Unit
from kronfac.model.registry import Site
from kronfac.model.uses import Uses, Watch

Function = Callable[..., Any]
Observer = Callable[..., Any]
O = TypeVar("O", bound=Observer)  # noqa: E741

OBSERVERS: dict[Function, Observer] = {}
"""By function: called with the `SeeFunctions`, then as the function is."""


def observes(*functions: Function) -> Callable[[O], O]:
    """Make a function the observer of torch functions."""

    def add(observer: O) -> O:
        OBSERVERS.update(dict.fromkeys(functions, observer))
        return observer

    return add


@dataclass(frozen=True)
class Derived:
    """A tensor that was computed from parameters alone."""

    value: Tensor
    roots: tuple[Tensor, ...]
    """The parameters."""
    transposed: bool = False
    """Whether it is one parameter's transpose."""


_TRANSPOSES = {Tensor.t, torch.t, Tensor.mT.__get__, Tensor.T.__get__}  # type: ignore[attr-defined]
_SWAPS, _PERMUTES = {Tensor.transpose, torch.transpose}, {Tensor.permute, torch.permute}


class SeeFunctions(TorchFunctionMode):
    """Sees the functions that this thread gives parameters to.

    Args:
        uses: what they record in.
        hooked: ids of parameters that are recorded by hooks.
    """

    def __init__(self, uses: Uses, hooked: set[int]) -> None:
        super().__init__()
        self.uses = uses
        self.unseen: dict[int, str] = {}
        """By the id of a parameter, why not all of its uses are understood."""
        self._hooked = hooked
        self._derived: dict[int, Derived] = {}

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        observer = OBSERVERS.get(func)
        if observer is not None:
            see = partial(observer, self)
            return call_plainly(see, types, args, kwargs) if types else see(*args, **kwargs)
        result = func(*args, **kwargs)
        self.follow(func, args, kwargs, result)
        return result

    def parameter(self, value: Any) -> Tensor | None:
        """The value, if it is a parameter whose uses are recorded here."""
        known = self.uses.knows(value) and id(value) not in self._hooked
        return value if known else None

    def derived(self, value: Any) -> Derived | None:
        """How a tensor was computed, if it was from parameters alone."""
        found = self._derived.get(id(value))
        return found if found is not None and found.value is value else None

    def follow(self, func: Function, args: Any, kwargs: Any, result: Any) -> None:
        """Follow parameters through a function without an observer; a use with other inputs is unseen."""
        leaves = tensors_of((args, kwargs))
        own = [leaf for leaf in leaves if self.parameter(leaf) is not None]
        others = [found.roots for leaf in leaves if (found := self.derived(leaf)) is not None]
        roots = [*own, *(root for found in others for root in found)]
        if not roots:
            return
        results = [x for x in tensors_of(result) if x.requires_grad]
        alone = all(self.parameter(x) is not None or self.derived(x) for x in leaves)
        for value in results:
            if self.parameter(value) is not None:
                continue  # itself, as `to` gives it back
            if alone:
                turned = _transposes(func, args) and self.parameter(args[0]) is not None
                self._derived[id(value)] = Derived(value, tuple(roots), turned)
            else:
                self.give_up(own, func)
                self.give_up(roots[len(own) :], func, computed=True)

    def elementwise(
        self, outputs: Tensor, *factors: tuple[Any, Tensor | None, Sequence[int]]
    ) -> None:
        """outputs = Σ_p P ⊙ x_p for triples (P, x_p, the shape that P is broadcast from)."""
        found: list[tuple[Tensor | None, Elementwise]] = []
        for value, x, shape in factors:
            kept = None if x is None else x.detach()
            if (p := self.parameter(value)) is not None:
                found.append((p, Elementwise(kept, torch.Size(shape))))
            elif (derived := self.derived(value)) is not None:
                found += [
                    (root, Elementwise(kept, torch.Size(shape), derived.value))
                    for root in derived.roots
                ]
        self.uses.elementwise(outputs, found)

    def product(
        self,
        outputs: Tensor,
        weight: Tensor | None,
        x: Tensor,
        bias: Tensor | None,
        func: Function,
        layout: Layout = PLAIN,
    ) -> None:
        """outputs = W x + b for a function that only uses parameters themselves, not what is derived."""
        self.give_up_inputs(func, *(v for v in (weight, bias) if self.parameter(v) is None))
        factors = [(self.parameter(weight), x), (self.parameter(bias), None)]
        self.uses.product(outputs, factors, layout)

    def give_up_inputs(self, func: Function, *values: Any) -> None:
        """Note parameters, and tensors derived from them, that a function was given as inputs."""
        for value in values:
            if (p := self.parameter(value)) is not None:
                self.give_up([p], func)
            elif (derived := self.derived(value)) is not None:
                self.give_up(derived.roots, func, computed=True)

    def give_up(
        self, parameters: Sequence[Tensor], func: Function, *, computed: bool = False
    ) -> None:
        """Remember that parameters, or what is computed from them, were used in a way not understood."""
        name = f"torch's {getattr(func, '__name__', func)}"
        given = f"{name} is given what is computed from it, not the parameter itself"
        for p in parameters:
            why = given if computed else f"used in {name}, which KFAC does not understand"
            self.unseen.setdefault(id(p), why)


def not_a_view(outputs: Tensor) -> Tensor:
    """A function's outputs, as no view of what it has computed inside.

    A write to a view in place replaces its node in the graph by that of what it is a view of; no gradient
    would arrive at the node that stands for the use. What is inside nobody else sees.
    """
    if not outputs._is_view():
        return outputs
    same: Tensor = torch.ops.aten._unsafe_view(outputs, outputs.shape)
    return same


def _transposes(func: Function, args: tuple[Any, ...]) -> bool:
    """Whether a function gives back the transpose of a matrix."""
    if not (args and isinstance(args[0], Tensor) and args[0].dim() == 2):
        return False
    if func in _TRANSPOSES:
        return True
    if func not in _SWAPS | _PERMUTES:
        return False
    given = args[1] if len(args) == 2 else args[1:]
    dims = [d % 2 for d in given] if isinstance(given, (tuple, list)) else []
    return (func in _SWAPS and set(dims) == {0, 1}) or (func in _PERMUTES and dims == [1, 0])


@contextmanager
def record_uses(
    sites: Sequence[Site],
    units: Sequence[Unit],
    examples: int,
    *,
    dims: ExampleDims = BY_CONVENTION,
    watch: Watch | None = None,
) -> Iterator[SeeFunctions]:
    """Record the uses of a forward pass inside this context, see `Uses`."""
    uses, thread = Uses(units, examples, dims, watch), threading.get_ident()

    def recorder(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                uses.by_module(site, args, kwargs, output)

        return hook

    # Before other hooks, which may return something else than the module did.
    handles = [
        s.module.register_forward_hook(recorder(s), with_kwargs=True, prepend=True) for s in sites
    ]
    hooked = {id(p) for s in sites for p in s.module._parameters.values() if p is not None}
    try:
        with SeeFunctions(uses, hooked) as seen:
            yield seen
    finally:
        for handle in handles:
            handle.remove()
