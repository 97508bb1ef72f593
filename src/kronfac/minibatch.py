"""The rows that the closure went through, so that K-FAC can go through them again.

One `Call` is one micro-batch: what the model was called with, and the targets. No graph is kept, and no
activations unless the closure is K-FAC's own and had them all at once anyway.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree


class Way(Protocol):
    """What some rows met on their way through the model: see `perceptron.py`."""

    def first(self, rows: int) -> "Way":
        """Of the first rows: views, no copies."""
        ...


@dataclass(frozen=True)
class Call:
    """One call of the model, with the targets of the loss call that followed it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    outputs: torch.Size
    """Shape of what the model returned, rows first."""
    targets: Tensor | None = None
    """Shaped for the likelihood: (rows, outputs), or (rows,) for class indices."""
    activations: dict[str, Tensor] | None = None
    """What every layer returned in the closure's pass, by its name, where that was kept."""
    way: Way | None = None
    """Where it was computed for several passes to use."""

    def first(self, rows: int) -> "Call":
        """The first rows of it: views, no copies."""
        if rows >= self.rows:
            return self

        def head(leaf: Any) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.rows
            return leaf[:rows] if batched else leaf

        return replace(
            self,
            args=pytree.tree_map(head, self.args),
            kwargs=pytree.tree_map(head, self.kwargs),
            rows=rows,
            outputs=torch.Size((rows, *self.outputs[1:])),
            targets=None if self.targets is None else self.targets[:rows],
            activations=self.activations and {n: s[:rows] for n, s in self.activations.items()},
            way=self.way and self.way.first(rows),
        )

    def repeated(self, times: int) -> "Call":
        """The same rows several times over, one copy after the other."""
        if times == 1:
            return self

        def repeat(leaf: Any) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self.rows
            return torch.cat([leaf] * times) if batched else leaf

        return Call(
            args=pytree.tree_map(repeat, self.args),
            kwargs=pytree.tree_map(repeat, self.kwargs),
            rows=times * self.rows,
            outputs=torch.Size((times * self.rows, *self.outputs[1:])),
        )

    def run(self, model: nn.Module, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """The model's outputs (rows, outputs) on these inputs, with other parameters if given."""
        if parameters is None:
            outputs = model(*self.args, **self.kwargs)
        else:
            outputs = torch.func.functional_call(model, dict(parameters), self.args, self.kwargs)
        return as_matrix(outputs)


@dataclass(frozen=True)
class Batch:
    """The mini-batch S′, as the closure went through it: one call a micro-batch."""

    calls: tuple[Call, ...]
    seen_loss: Tensor | None = None
    """The objective over these rows by the loss module's own account; None unless the outputs of every
    call went into it as they were, which is what it takes to compute h(θ + δ) without the closure."""
    mixed: bool = False
    """Whether that was in half precision, which K-FAC's own passes are not."""

    @property
    def cases(self) -> int:
        """m, the rows of all calls."""
        return sum(call.rows for call in self.calls)

    @property
    def outputs(self) -> int:
        """Outputs of a case."""
        return math.prod(self.calls[0].outputs[1:])

    def with_activations(self, activations: dict[str, Tensor] | None) -> "Batch":
        """What the layers returned in the closure's only call, if it was kept."""
        if activations is None or len(self.calls) > 1:
            return self
        return replace(self, calls=(replace(self.calls[0], activations=activations),))

    def first(self, fraction: float) -> "Batch":
        """The first ⌈fraction · m⌉ cases, in the chunks in which they came.

        The mini-batch is a random one, so its first rows are a random subset of it.
        """
        # 0.07 · 100 is a little above 7.
        return self.leading(math.ceil(fraction * self.cases - 1e-9))

    def leading(self, cases: int) -> "Batch":
        """The first cases, of which there may be fewer."""
        calls = []
        for call in self.calls:
            if cases > 0:
                calls.append(call.first(cases))
                cases -= call.rows
        return Batch(tuple(calls))


def draws_masks(model: nn.Module) -> bool:
    """Whether two passes over the same rows differ, by dropout."""
    return any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules())


def as_matrix(outputs: Tensor) -> Tensor:
    """(rows, outputs), whatever came after the rows."""
    return outputs.reshape(len(outputs), -1)
