"""What each example contributes to the Fisher: ā of every layer, and vectors g that stand for all y.

For an example x the model's own distribution over y enters only through E_y[g gᵀ] = Jᵀ F_R J, J = ∂f/∂s.
With F_R = Σ_k r_k r_kᵀ (`Likelihood.fisher_root_columns`) it is Σ_k g⁽ᵏ⁾ g⁽ᵏ⁾ᵀ for g⁽ᵏ⁾ = Jᵀ r_k: one
backward pass for each output, and no sampling. The objective's scale c is in g, as √c.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from kronfac.curvature import ExactFisher, SummedGradient, Tap, Taps
from kronfac.curvature.fisher import Outputs
from kronfac.errors import UnsupportedModelError
from kronfac.linearize import Traced
from kronfac.model import Blocks, Buffers, Network, Unit, find_units
from kronfac.objective import objective_of
from kronfac.record import LossCall, ModelCall, Pass
from kronfac.record.chain import chain_network, find_chains

Inputs = Tensor | tuple[Tensor, ...]

# Doubles of work space that a chunk of examples may take: 64 MB, which is more than the caches and less
# than anybody minds.
WORK_SPACE = 2**23


@dataclass(frozen=True)
class LayerCases:
    """Some examples, as one layer sees them."""

    a: Tensor  # (examples, in+1)
    g: Tensor  # (outputs, examples, out): Σ over the first dimension is E_y


class Cases:
    """The examples and the layers of a diagnostic, gone through in chunks."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        x: Inputs,
        layers: Sequence[str] | None,
        chunk: int | None,
    ) -> None:
        """`layers` are names of modules, in the order wanted; None for all that KFAC would train.

        Those come in the order of the chain, if the model is one.
        """
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk is a number of cases, 1 or more; got {chunk}.")
        # A copy, so that it can be evaluated in float64, and is: cumulants are small differences.
        self._model = copy.deepcopy(getattr(model, "_orig_mod", model)).double()
        _refuse_dropout(self._model)
        self._objective = objective_of(loss)
        args = x if isinstance(x, tuple) else (x,)
        self._args = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
        self.count = len(self._args[0])
        if not self.count or any(len(arg) != self.count for arg in self._args):
            raise ValueError(
                "A diagnostic needs at least one case, and as many in every input; got "
                f"{[len(arg) for arg in self._args]}."
            )
        self._outputs = self._output_shape()
        found = find_units(self._model, Blocks(unsupported="refuse"))
        self._network = Network(
            self._model, found.units, found.sites, self._objective, Buffers(self._model)
        )
        self._chain, self._not_a_chain = self._find_chain()
        self.layers = _select(list(self._network.units), layers)
        whole = self._objective.declare(torch.Size((self.count, *self._outputs)))
        self._scale = math.sqrt(whole.total_weight)
        self._chunk = chunk or self._default_chunk()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer.name for layer in self.layers)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(out, in+1) of every layer."""
        return [layer.shape for layer in self.layers]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Weights of every layer."""
        return tuple(d_out * d_in for d_out, d_in in self.shapes)

    def __iter__(self) -> Iterator[list[LayerCases]]:
        """Chunk after chunk, one entry per layer."""
        for args in self._parts():
            view = Traced(self._network, self._pass(args))
            outputs = [
                Outputs(terms, z) for terms, z in zip(view.part.terms, view.outputs, strict=True)
            ]
            passes = [
                self._select(view.taps([None if v is None else v * self._scale for v in vectors]))
                for vectors in ExactFisher().vectors(outputs)
            ]
            yield [
                LayerCases(
                    _only(taps[0].dense_inputs(), unit),
                    torch.stack([_only(tap.grads, unit) for tap in taps]),
                )
                for unit, *taps in zip(self.layers, *passes, strict=True)
            ]

    @torch.no_grad()
    def mean_inputs(self) -> list[Tensor]:
        """E[ā] of every layer, (in+1,), by forward passes alone."""
        sums: list[Tensor] | None = None
        for args in self._parts():
            view = Traced(self._network, self._pass(args))
            zeros = [torch.zeros_like(z) for z in view.outputs]
            taps = self._select(view.taps(zeros))
            parts = [
                _only(tap.dense_inputs(), unit).sum(dim=0)
                for tap, unit in zip(taps, self.layers, strict=True)
            ]
            sums = parts if sums is None else [s + p for s, p in zip(sums, parts, strict=True)]
        assert sums is not None
        return [s / self.count for s in sums]

    def _pass(self, args: tuple[Tensor, ...]) -> Pass:
        """A pass over some examples, with their terms unscaled."""
        shape = torch.Size((len(args[0]), *self._outputs))
        terms = replace(self._objective.declare(shape), scale=1.0)
        return Pass((ModelCall(args, {}, (0,)),), (LossCall(0, terms),))

    def _select(self, taps: Sequence[Taps]) -> list[Tap]:
        """The one tap of each layer that this is of."""
        number = {id(unit): n for n, unit in enumerate(self._network.units)}
        found = []
        for unit in self.layers:
            own = taps[number[id(unit)]]
            if isinstance(own, SummedGradient) or len(own) != 1:
                raise UnsupportedModelError(
                    "The exact expectations are for layers that are used once; layer "
                    f"{unit.name!r} is not. Leave it out with layers=[names]."
                )
            tap = own[0]
            assert isinstance(tap, Tap)
            found.append(tap)
        return found

    def chain_problem(self) -> str | None:
        """Why these layers are not neighbours in a chain, in order; None if they are [MG15 §4.3]."""
        chain, names = [layer.name for layer in self._chain], list(self.names)
        if not chain:
            return self._not_a_chain
        start = chain.index(names[0])
        if chain[start : start + len(names)] == names:
            return None
        return f"F̂ needs layers that follow each other in the network's chain {chain}; got {names}."

    def _find_chain(self) -> tuple[list[Unit], str | None]:
        """The layers in their order, or why they have none."""
        part = self._pass(tuple(arg[:2] for arg in self._args))
        breaks = find_chains(self._network, part).breaks
        if breaks:
            number, why = next(iter(breaks.items()))
            name = self._network.units[number].name
            return (
                [],
                f"F̂ needs a chain of layers, each fed by the one before alone; {name!r}: {why}.",
            )
        self._network = chain_network(self._network, part)
        return list(self._network.units), None

    def _parts(self) -> Iterator[tuple[Tensor, ...]]:
        for start in range(0, self.count, self._chunk):
            yield tuple(arg[start : start + self._chunk] for arg in self._args)

    @torch.no_grad()
    def _output_shape(self) -> torch.Size:
        """The shape of the outputs of one example."""
        outputs = self._model(*(arg[:2] for arg in self._args))
        if not isinstance(outputs, Tensor) or outputs.dim() == 0:
            raise UnsupportedModelError(
                "A diagnostic needs a model that returns one tensor with the cases as its first "
                f"dimension; {type(self._model).__name__} returned a {type(outputs).__name__}."
            )
        # Outputs are targets of the right shape; what the likelihood refuses is their dimensions.
        self._objective.likelihood.check(outputs, outputs)
        return outputs.shape[1:]

    def _default_chunk(self) -> int:
        """As many examples as have products that fit into the work space."""
        outs, ins = zip(*self.shapes, strict=True)
        widest = max(ins) ** 2 + max(outs) ** 2
        a_case: int = sum(ins) + math.prod(self._outputs) * sum(outs) + widest
        return max(1, WORK_SPACE // a_case)


def add(sums: dict[tuple[int, int], Tensor], pair: tuple[int, int], term: Tensor) -> None:
    """Add a new tensor to the sum of a pair of layers."""
    if pair in sums:
        sums[pair].add_(term)
    else:
        sums[pair] = term


def _select(layers: list[Unit], names: Sequence[str] | None) -> list[Unit]:
    if names is None:
        return layers
    by_name = {layer.name: layer for layer in layers}
    if isinstance(names, str) or not names or len(set(names)) < len(names):
        raise ValueError(f"layers is a list of different names of layers; got {names!r}.")
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"The model trains the layers {sorted(by_name)}; got {unknown}.")
    return [by_name[name] for name in names]


def _only(rows: Tensor, layer: Unit) -> Tensor:
    """(examples, features) of (examples, places, features), for layers that use their weights once."""
    if rows.shape[1] != 1:
        raise UnsupportedModelError(
            f"The exact expectations are for layers that use their weights once in a case; layer "
            f"{layer.name!r} uses them {rows.shape[1]} times. Leave it out with layers=[names]."
        )
    return rows[:, 0]


def _refuse_dropout(model: nn.Module) -> None:
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in model.modules()):
        raise UnsupportedModelError(
            "A diagnostic goes through the cases more than once and needs the same outputs each time; "
            "this model draws dropout masks. Call model.eval() first."
        )
