"""What the user's code did between the model and the loss, so that K-FAC can do it again.

A `Pass` is one micro-batch: the calls of the model, the operations between their outputs and the loss, and
the loss calls. It can be run with other parameters or on some of the examples. No graph and no activations
are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from kronfac.linalg import take
from kronfac.network.side_effects import RandomState, replay
from kronfac.objective import READERS, Terms

Function = Callable[..., Any]


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor that an earlier step of the pass computes."""

    index: int


@dataclass(frozen=True)
class ModelCall:
    """One call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    """Indices of the tensors in what it returned."""
    losses: tuple[int, ...] = ()
    """Indices of what it called loss functions with, inside its forward."""
    random: RandomState | None = None
    """The generators' state before it, if it drew from them."""
    trace: Any = None
    """What the examples met on their way through the network, if it is kept for several passes."""

    def run(self, forward: Function) -> Iterator[tuple[int, Tensor]]:
        """The tensors that it computes, with their indices."""
        with replay(self.random), CatchLosses() if self.losses else nullcontext() as caught:
            outputs = forward(*self.args, **self.kwargs)
        yield from zip(self.outputs, tensors_of(outputs), strict=True)
        if caught is not None:
            yield from zip(self.losses, caught.inputs, strict=True)


@dataclass(frozen=True)
class Operation:
    """One call of a torch function, such as a reshape."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]

    def run(self, values: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The tensors that it computes, with their indices."""
        args, kwargs = (fill(given, values) for given in (self.args, self.kwargs))
        yield from zip(self.outputs, tensors_of(self.function(*args, **kwargs)), strict=True)


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function."""

    input: int
    """The index of the outputs that it is about."""
    terms: Terms
    value: Tensor | None = None
    """What it returned, times what it counts in the objective; None if K-FAC can't compute it."""
    function: Function | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    factor: float | Tensor = 1.0
    """What it counts in the objective."""

    def scaled(self, factor: float) -> "LossCall":
        """The same call, counting `factor` times as much."""
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
        result: Tensor = loss.double() * self.factor
        return result


@dataclass(frozen=True)
class Pass:
    """One micro-batch."""

    steps: tuple[ModelCall | Operation, ...]
    losses: tuple[LossCall, ...]

    @property
    def calls(self) -> list[ModelCall]:
        """The calls of the model."""
        return [step for step in self.steps if isinstance(step, ModelCall)]

    @cached_property
    def examples(self) -> int:
        """The length of the first tensor that the model was called with."""
        call = self.calls[0]
        if call.args and isinstance(call.args[0], Tensor) and call.args[0].dim() > 0:
            return len(call.args[0])
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return len(leaf)
        return self.losses[0].terms.count

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(call.random is not None for call in self.calls)

    @cached_property
    def terms(self) -> list[Terms]:
        """The terms of every loss call."""
        return [loss.terms for loss in self.losses]

    def run(self, model: Function) -> list[Tensor]:
        """The outputs that every loss call gets, in its own layout; `model` is called as the model was."""
        values: dict[int, Tensor] = {}
        for step in self.steps:
            values.update(step.run(model) if isinstance(step, ModelCall) else step.run(values))
        return [values[loss.input] for loss in self.losses]

    def select(self, index: Tensor | range, every: bool) -> "Pass":
        """The pass over some of the examples; views for a range of them.

        Args:
            index: which ones, ascending.
            every: whether all tensor arguments of the first one's length have the examples as their
                first dimension; else only the first one has.
        """
        examples, first = self.examples, True
        part: Any = slice(index.start, index.stop) if isinstance(index, range) else index

        def rows(leaf: Any) -> Any:
            nonlocal first
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != examples:
                return leaf
            if not (every or first):
                return leaf
            first = False
            return take(leaf, part)

        steps = tuple(
            replace(
                step,
                args=_map_leaves(rows, step.args),
                kwargs=_map_leaves(rows, step.kwargs),
                trace=None if step.trace is None else step.trace.select(part),
            )
            if isinstance(step, ModelCall)
            else step
            for step in self.steps
        )
        return replace(
            self, steps=steps, losses=tuple(_select(loss, index, examples) for loss in self.losses)
        )


def _select(loss: LossCall, index: Tensor | range, examples: int) -> LossCall:
    """The terms of these examples: those of an example stand together, as many for each."""
    terms = loss.terms
    each = terms.count // examples
    shape = torch.Size((terms.shape[0] * len(index) // examples, *terms.shape[1:]))
    if isinstance(index, range):
        chosen: Tensor | slice = slice(index.start * each, index.stop * each)
    else:
        like = terms.targets if terms.targets is not None else terms.weight
        device = index.device if like is None else like.device
        chosen = index.to(device)[:, None] * each + torch.arange(each, device=device)
        chosen = chosen.reshape(-1)
    return replace(loss, terms=terms.select(chosen, shape), value=None)


@dataclass(frozen=True)
class Batch:
    """The mini-batch S′, as the closure went through it: one pass per micro-batch."""

    passes: tuple[Pass, ...]
    seen: bool = True
    """Whether K-FAC can compute the loss of these passes: all loss calls were seen."""
    mixed: bool = False
    """Whether the closure ran in half precision, which K-FAC's own passes do not."""

    @cached_property
    def examples(self) -> int:
        """m, the examples of all passes."""
        return sum(part.examples for part in self.passes)

    @property
    def traced(self) -> bool:
        """Whether all passes have kept what they met, the masks that they drew among it."""
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
        """The same mini-batch with its loss times a factor."""
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
    def seen_loss(self) -> Tensor | None:
        """The objective over these examples by the loss calls' own account, if all of it was seen."""
        values = [loss.value for part in self.passes for loss in part.losses]
        known = [value for value in values if value is not None]
        if not self.seen or len(known) < len(values):
            return None
        if len(known) == 1:
            return known[0].double()
        return torch.stack([value.double() for value in known]).sum()


# --------------------------------------------------------------------------------------------- values


class CatchLosses(TorchFunctionMode):
    """What loss functions are called with, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READERS:
            self.inputs.append(loss_input(args, kwargs))
        return func(*args, **kwargs)


def loss_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The outputs among the arguments of a loss function."""
    given = [value for value in args if not isinstance(value, nn.Module)]
    outputs: Tensor = given[0] if given else kwargs.get("input", kwargs.get("outputs"))
    return outputs


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested containers and dataclasses."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def fill(given: Any, values: Mapping[int, Tensor]) -> Any:
    """Arguments with tensors in the places of their references."""
    return _map_leaves(lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf, given)


def _map_leaves(function: Function, given: Any) -> Any:
    """`pytree.tree_map`, which is slow, but for arguments that are all there is to map."""
    if not given:
        return given
    if type(given) is tuple and all(isinstance(value, (Tensor, Ref)) for value in given):
        return tuple(map(function, given))
    return pytree.tree_map(function, given)
