"""The user's code between the model and the loss, recorded so that K-FAC can repeat it.

A `Pass` is one micro-batch: the calls of the model or of modules in it, the operations between their
outputs and the loss, and the loss calls. It can be run with other parameters or on some of the examples.
No graph and no activations are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from kronfac.model.nested import Ref, as_plain, fill, tensors_of
from kronfac.model.network import BY_CONVENTION, ExampleDims
from kronfac.model.side_effects import Kept, RandomState, own_pass, replay, start_from
from kronfac.objective import JOINED, READERS, Terms

__all__ = ["Batch", "LossCall", "ModelCall", "Operation", "Pass", "Ref"]

Function = Callable[..., Any]
HALF = (torch.float16, torch.bfloat16)
"""Dtypes that autocast computes in, and K-FAC's own passes do not."""


@dataclass(frozen=True)
class ModelCall:
    """One call of the model, or of a module in it."""

    args: tuple[Any, ...]
    """With a `Ref` for every tensor that an earlier step computes."""
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    """Indices of the returned tensors, in the order in which `tensors_of` finds them."""
    losses: tuple[int, ...] = ()
    """Indices of the inputs of the loss functions that its forward called."""
    random: RandomState | None = None
    """State of the random generators before the call; None if it drew no numbers."""
    trace: Any = None
    """The examples' activations and slopes (`linearize.Trace`), if several passes use them."""
    buffers: tuple[Kept, ...] = ()
    """Copies, from before the call, of the buffers that it writes to."""
    path: str = ""
    """The name of the called module in `named_modules`; empty for the model itself."""
    shapes: tuple[torch.Size, ...] = ()
    """Shapes of the returned tensors."""

    def run(self, model: Function, values: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The tensors that it computes, with their indices."""
        forward: Function = model
        if self.path:
            assert isinstance(model, nn.Module)
            forward = model.get_submodule(self.path)
        args, kwargs = fill((self.args, self.kwargs), values)
        with (
            replay(self.random),
            start_from(self.buffers),
            CatchLosses() if self.losses else nullcontext() as caught,
        ):
            outputs = forward(*args, **kwargs)
        yield from zip(self.outputs, map(as_plain, tensors_of(outputs)), strict=True)
        if caught is not None:
            yield from zip(self.losses, map(as_plain, caught.inputs), strict=True)


@dataclass(frozen=True)
class Operation:
    """One call of a torch function, such as a reshape."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    random: RandomState | None = None
    """State of the random generators before the call; None if it drew no numbers."""

    def run(self, model: Function, values: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The tensors that it computes, with their indices."""
        args, kwargs = fill((self.args, self.kwargs), values)
        with replay(self.random):
            result = self.function(*args, **kwargs)
        yield from zip(self.outputs, tensors_of(result), strict=True)


Step = ModelCall | Operation


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function."""

    input: int
    """The index of its outputs z."""
    terms: Terms
    value: Tensor | None = None
    """Its part of the objective; None if K-FAC can't compute it."""
    function: Function | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    factor: float | Tensor = 1.0
    """Its factor in the objective: the gradient that arrived at it."""

    def scaled(self, factor: float) -> "LossCall":
        """The call with a factor in the objective that is `factor` times as large."""
        return replace(
            self,
            terms=self.terms.scaled(factor),
            value=None if self.value is None else self.value * factor,
            factor=self.factor * factor,
        )

    def evaluate(self, outputs: Tensor) -> Tensor:
        """Its part of the objective for other outputs, float64."""
        assert self.function is not None
        values = {self.input: outputs}
        loss = self.function(*fill(self.args, values), **fill(self.kwargs or {}, values))
        result: Tensor = (loss.double() * self.factor).sum()
        return result


@dataclass(frozen=True)
class Pass:
    """One micro-batch."""

    steps: tuple[Step, ...]
    losses: tuple[LossCall, ...]
    dims: ExampleDims = BY_CONVENTION
    """The dimensions of its examples (`examples.py`)."""

    @property
    def apart(self) -> bool:
        """Whether a subset of the examples can be passed alone."""
        return self.dims.apart

    @property
    def calls(self) -> list[ModelCall]:
        """The calls of the model."""
        return [step for step in self.steps if isinstance(step, ModelCall)]

    @cached_property
    def examples(self) -> int:
        """The length of the first tensor that the model was called with."""
        for call in self.calls:
            for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                if isinstance(leaf, Tensor) and leaf.dim() > 0:
                    return len(leaf)
        return self.losses[0].terms.count

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(step.random is not None for step in self.steps)

    @cached_property
    def terms(self) -> list[Terms]:
        """The terms of every loss call."""
        return [loss.terms for loss in self.losses]

    @cached_property
    def signature(self) -> object:
        """Equal for passes whose examples are along the same dimensions (`examples.py`)."""
        n = self.examples
        leaves, spec = pytree.tree_flatten([(step.args, step.kwargs) for step in self.steps])
        shapes = tuple(
            tuple(size == n for size in leaf.shape) if isinstance(leaf, Tensor) else None
            for leaf in leaves
        )
        # Not how many terms an example has: sequences of other lengths need no check of their own.
        terms = tuple(
            (len(t.shape), t.count == 0, t.count % n == 0, t.count == n) for t in self.terms
        )
        return str(spec), shapes, tuple(call.path for call in self.calls), terms

    def run(self, model: Function) -> list[Tensor]:
        """The outputs z of every loss call, in its own layout; `model` replaces the recorded one."""
        values: dict[int, Tensor] = {}
        with own_pass():
            for step in self.steps:
                values.update(step.run(model, values))
        return [values[loss.input] for loss in self.losses]


@dataclass(frozen=True)
class Batch:
    """The mini-batch S′, with one pass per micro-batch of the closure or loop."""

    passes: tuple[Pass, ...]
    seen: bool = True
    """Whether K-FAC can compute the loss of these passes: all loss calls were seen."""
    assumed: bool = False
    """Whether no loss was seen or declared: the terms are those of the loss that K-FAC was given."""
    outside: tuple[torch.Size, ...] = ()
    """Shapes of the leaves outside the model that the loss depends on, and that require a gradient."""
    mixed: bool = False
    """Whether the closure ran in half precision, which K-FAC's own passes do not."""
    weightless: bool = False
    """Whether its terms have no weight: it stands for the empty share of a rank without examples."""

    @cached_property
    def examples(self) -> int:
        """m, the examples of all passes."""
        if self.weightless:
            return 0
        return sum(part.examples for part in self.passes)

    @cached_property
    def most_terms(self) -> int:
        """Σ over passes of the terms of the loss call that has the most."""
        return sum(max(terms.count for terms in part.terms) for part in self.passes)

    @property
    def traced(self) -> bool:
        """Whether all calls have a trace, dropout masks included."""
        return all(call.trace is not None for part in self.passes for call in part.calls)

    @property
    def random(self) -> bool:
        """Whether a pass draws random numbers."""
        return any(part.random for part in self.passes)

    @cached_property
    def total_weight(self) -> float:
        """Σ s w over all terms: what multiplies the Fisher of an average term."""
        return sum(terms.total_weight for part in self.passes for terms in part.terms)

    def scaled(self, factor: float) -> "Batch":
        """The mini-batch with its loss multiplied by a factor."""
        if factor == 1:
            return self
        return replace(
            self,
            passes=tuple(
                replace(part, losses=tuple(loss.scaled(factor) for loss in part.losses))
                for part in self.passes
            ),
        )

    @property
    def summed(self) -> bool:
        """Whether the loss grows with the number of examples."""
        return all(terms.summed for part in self.passes for terms in part.terms)

    @cached_property
    def recorded_loss(self) -> Tensor | None:
        """The sum of the recorded loss calls; None if not all were recorded."""
        values = [loss.value for part in self.passes for loss in part.losses]
        known = [value for value in values if value is not None]
        if not self.seen or len(known) < len(values):
            return None
        if len(known) == 1:
            return known[0].double()
        return torch.stack([value.double() for value in known]).sum()


class CatchLosses(TorchFunctionMode):
    """Collects the inputs of loss functions, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in JOINED:
            with self:
                return JOINED[func](*args, **kwargs)
        if func in READERS:
            self.inputs.append(loss_input(args, kwargs))
        return func(*args, **kwargs)


def loss_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The outputs among the arguments of a loss function."""
    given = [value for value in args if not isinstance(value, nn.Module)]
    outputs: Tensor = given[0] if given else kwargs.get("input", kwargs.get("outputs"))
    return outputs
