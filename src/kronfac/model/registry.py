"""How a module type uses its parameters, and the registry of those that K-FAC knows.

An adapter says which parameters of a module form one matrix V, and which curvature block it gets. What they
were multiplied with is seen at the torch functions that the module calls (`functions.py`); an adapter of a
module that computes in another way says it itself, after every call. Everything else follows from that:
s = V ā for every example and place, so that the gradient is Σ g āᵀ, and the curvature block A ⊗ G comes
from the second moments of ā and g.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from kronfac.curvature import Block
from kronfac.model.blocks import Blocks, Kind


@dataclass(frozen=True)
class Use:
    """One multiplication of a module's parameters: outputs = Σ_p P inputs_p."""

    inputs: Mapping[str, Tensor | None]
    """What each parameter was multiplied with, by its name in the module, (examples, …, columns); None
    stands for ones, which a bias is multiplied with."""
    outputs: Tensor
    """The result, as it stands in the autograd graph: no view that the adapter itself has made."""
    arrange: Callable[[Tensor], Tensor] | None = None
    """Makes (examples, …, rows) of a tensor of the outputs' shape, if that is another."""

    def arranged(self, outputs: Tensor) -> Tensor:
        """Outputs, or gradients at them, (examples, …, rows)."""
        return outputs if self.arrange is None else self.arrange(outputs)


@runtime_checkable
class Adapter(Protocol):
    """What K-FAC has to know of a module type.

    It may also have a method `block(module)` that returns the curvature block that it wants, and a method
    `uses(module, args, kwargs, output)` that returns a list of `Use`, for modules that multiply their
    parameters by other means than torch's functions for layers.
    """

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """The parameters that it describes, by their names in the module, the weight (rows, …) first."""
        ...


@dataclass(frozen=True)
class Site:
    """A module whose adapter says itself what its parameters are multiplied with."""

    name: str
    module: nn.Module
    adapter: Adapter


class Layer:
    """An adapter of a layer of torch's, whose uses are seen at the functions that it calls."""

    kind: ClassVar[Kind] = "matrix"

    def groups(self, module: nn.Module) -> list[tuple[str, ...]]:
        """The names of the parameters of every unit."""
        return [("weight", "bias")]

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """All parameters of the module's units; the weight first, as `groups` lists them."""
        own = module._parameters
        named = {name: own.get(name) for group in self.groups(module) for name in group}
        return {name: p for name, p in named.items() if p is not None}

    def kind_of(self, module: nn.Module, first: str) -> Kind:
        """How a module uses the unit whose first parameter has this name."""
        return self.kind

    def refusal(self, module: nn.Module) -> str:
        """Why a module can't be trained, with a remedy; empty if it can."""
        return ""

    def swapped(self, module: nn.Module) -> int:
        """The number of groups of a weight that is stored as (in, out / groups, …); 0 for (out, in, …)."""
        return 0


def block_of(
    adapter: Adapter, module: nn.Module, first: str, shape: tuple[int, int], blocks: Blocks
) -> Block:
    """The block that an adapter's method `block` wants for a module, if it has one; else by its kind.

    `first` is the name of the unit's first parameter in the module.
    """
    choose = getattr(adapter, "block", None)
    if choose is None:
        kind = adapter.kind_of(module, first) if isinstance(adapter, Layer) else "matrix"
        return blocks.choose(kind, *shape)
    block = choose(module)
    if not isinstance(block, Block):
        raise TypeError(
            f"The method block of {type(adapter).__name__} has to return a block, such as "
            f"kronfac.extend.KroneckerBlock(); got {block!r}."
        )
    return block


_ADAPTERS: dict[type[nn.Module], tuple[Adapter, bool]] = {}
_BY_NAME: dict[str, Adapter] = {}
"""Adapters of modules from other libraries, by their full names, so that these need not be imported."""


def register(kind: type[nn.Module], adapter: Adapter, *, subclasses: bool = False) -> None:
    """Tell K-FAC how a module type uses its parameters; the last registration wins.

    Args:
        kind: the module type.
        adapter: see `Adapter`.
        subclasses: whether it also holds for subclasses, which may do something else in their forward.

    It is looked up when a `KFAC` is made.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"kronfac.register needs a module type; got {kind!r}.")
    if isinstance(adapter, type) or not isinstance(adapter, Adapter):
        raise TypeError(
            f"kronfac.register needs an adapter with the method parameters; got {adapter!r}."
        )
    _ADAPTERS[kind] = (adapter, subclasses)


def register_name(name: str, adapter: Adapter) -> None:
    """Register an adapter by a module type's full name, so that its library need not be imported."""
    _BY_NAME[name] = adapter


def adapter_for(module: nn.Module) -> Adapter | None:
    """The adapter of a module's type, or of the nearest base class registered with `subclasses=True`."""
    kind = type(module)
    for base in kind.__mro__:
        adapter, subclasses = _ADAPTERS.get(base, (None, False))
        if adapter is not None and (base is kind or subclasses):
            return adapter
    return _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
