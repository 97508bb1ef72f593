"""How a module type uses its parameters, and the registry of those that K-FAC knows.

An adapter says two things: which parameters of a module form one matrix V, and, after a call, what they
were multiplied with. Everything else follows from that: s = V ā for every example and place, so that the
gradient is Σ g āᵀ, and the curvature block A ⊗ G comes from the second moments of ā and g.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from kronfac.curvature import Block, KroneckerBlock


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

    It may also have a method `block(module)` that returns the curvature block that it wants.
    """

    def parameters(self, module: nn.Module) -> Mapping[str, nn.Parameter]:
        """The parameters that it describes, by their names in the module, the weight (rows, …) first."""
        ...

    def uses(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> list[Use]:
        """What the parameters were multiplied with in one call of the module."""
        ...


def block_of(adapter: Adapter, module: nn.Module) -> Block:
    """The block that an adapter's method `block` wants for a module, if it has one; else A ⊗ G."""
    choose = getattr(adapter, "block", None)
    block = KroneckerBlock() if choose is None else choose(module)
    if not isinstance(block, Block):
        raise TypeError(
            f"The method block of {type(adapter).__name__} has to return a block, such as "
            f"kronfac.KroneckerBlock(); got {block!r}."
        )
    return block


_ADAPTERS: dict[type[nn.Module], tuple[Adapter, bool]] = {}


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
            f"kronfac.register needs an adapter with the methods parameters and uses; got {adapter!r}."
        )
    _ADAPTERS[kind] = (adapter, subclasses)


def adapter_for(module: nn.Module) -> Adapter | None:
    """The adapter of a module: of its type, else of the nearest base class that speaks for subclasses."""
    kind = type(module)
    for base in kind.__mro__:
        adapter, subclasses = _ADAPTERS.get(base, (None, False))
        if adapter is not None and (base is kind or subclasses):
            return adapter
    return None


def known_types() -> list[str]:
    """The names of the module types that have an adapter."""
    return [
        f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__name__
        for kind in _ADAPTERS
    ]
