"""The network around θ on one micro-batch: outputs f, J v and Jᵀ r.

Everything that a step asks of the network's derivatives goes through here. Layouts: outputs z of every loss
call are (terms, event), J v of k directions (k, terms, event), vectors r like the outputs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient, Taps
from kronfac.linearize.jvp import outputs_and_jvp
from kronfac.model import Matrices, Network, Uses, dot, record_uses
from kronfac.record import Pass
from kronfac.warn import warn

TOLERANCE = 0.01
"""How far rᵀJv and (Jᵀr)ᵀv may be apart: finite differences are off by some 1e-3 in float32."""
LENGTHS = (1.0, 0.125, 0.015625)
"""Differences that are tried, in units of the usual one, until J v agrees with the gradient."""
WRONG_TANGENTS = (
    "The curvature along a step does not agree with the gradient: the closure or the model computes "
    "something from parameters that KFAC does not see again, or that has another derivative than its value "
    "says (a parameter used outside of the model, a custom autograd function, detached values). Steps may "
    "be too long or too short. Put what uses parameters into the model's forward."
)


class Linearization(ABC):
    """f, J v and Jᵀ r of one micro-batch."""

    def __init__(self, part: Pass) -> None:
        self.part = part

    @property
    @abstractmethod
    def outputs(self) -> Sequence[Tensor]:
        """z of every loss call, without a graph."""

    @property
    @abstractmethod
    def summed(self) -> bool:
        """Whether the taps of some units are only their gradient, summed over the examples."""

    @abstractmethod
    def taps(self, vectors: Sequence[Tensor | None]) -> Sequence[Taps]:
        """For rᵀf, the taps (ā and g) of every use of each unit, or only its Jᵀ r; None is a zero r."""

    @abstractmethod
    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        """J v of every loss call, for all directions."""

    @abstractmethod
    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        """Jᵀ r, summed over the examples."""


class Traced(Linearization):
    """The graph of one forward pass, made when it is first needed."""

    def __init__(self, network: Network, part: Pass) -> None:
        super().__init__(part)
        self._network = network
        self._values: list[Tensor] | None = None

    @cached_property
    def _graph(self) -> tuple[list[Tensor], list[Tensor], Uses]:
        """Outputs of the loss calls with a graph, as (terms, event) and raw, and the uses of the units."""
        network = self._network
        part = self.part
        with (
            torch.enable_grad(),
            record_uses(network.sites, network.units, part.examples, dims=part.dims) as seen,
        ):
            raw = part.run(network.model)
        with torch.enable_grad():
            ends = [terms.matrix(z) for terms, z in zip(self.part.terms, raw, strict=True)]
        return ends, raw, seen.uses

    def raw_outputs(self) -> list[Tensor]:
        """z of every loss call in the shape that it got."""
        return self._graph[1]

    @property
    def outputs(self) -> Sequence[Tensor]:
        """The outputs that a pass for J v has computed, if there was one; else those of the graph."""
        if self._values is not None:
            return self._values
        return [end.detach() for end in self._graph[0]]

    @property
    def summed(self) -> bool:
        units, uses = self._network.units, self._graph[2]
        return any(not unit.observed for unit in units) or uses.summed

    @property
    def half_precision(self) -> bool:
        """Whether the model uses parameters in half precision."""
        return self._graph[2].half_precision

    def taps(self, vectors: Sequence[Tensor | None]) -> list[Taps]:
        """Taps; autograd computes no gradients of weights whose uses are recorded."""
        units, uses = self._network.units, self._graph[2]
        others = [p for unit in units if not unit.observed for p in unit.parameters]
        grads = self._backward(vectors, [*uses.edges, *others])
        at_uses, at_others = grads[: len(uses.edges)], iter(grads[len(uses.edges) :])
        taps: list[Taps] = []
        for n, unit in enumerate(units):
            if unit.observed:
                taps.append(uses.taps(n, at_uses))
                continue
            parts = [next(at_others) for _ in unit.parameters]
            zeros = (torch.zeros_like(p) for p in unit.parameters)
            V = unit.join([z if g is None else g for g, z in zip(parts, zeros, strict=True)])
            taps.append(SummedGradient(V))
        return taps

    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        learned = self._network.learned
        found = self._jvp(directions)
        # Until the optimizer has taken a step.
        if not learned.compared and not self._consistent(directions[0], found):
            return self._by_differences(directions)
        return found

    def _by_differences(self, directions: Sequence[Matrices]) -> list[Tensor]:
        """J v by the longest differences that agree with the gradient; a warning if none do.

        An example may go another way at θ ± εv than at θ, as to another expert. It does so less often if
        ε is smaller, whereas a derivative that is not the gradient's is as wrong at every ε.
        """
        learned = self._network.learned
        learned.forward_mode, longest = False, learned.difference
        for learned.difference in (length for length in LENGTHS if length <= longest):
            found = self._jvp(directions)
            if self._consistent(directions[0], found):
                return found
        warn(WRONG_TANGENTS)
        learned.difference = longest
        return self._jvp(directions)

    def _jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        values, tangents = outputs_and_jvp(self._network, self.part, directions)
        self._values = [terms.matrix(z) for terms, z in zip(self.part.terms, values, strict=True)]
        return [terms.matrix(Jv) for terms, Jv in zip(self.part.terms, tangents, strict=True)]

    def _consistent(self, direction: Matrices, tangents: Sequence[Tensor]) -> bool:
        """Whether rᵀ(J v) = (Jᵀ r)ᵀ v for r = w ⊙ J v, up to what finite differences are off by.

        With the weights w of the terms: no step depends on the outputs at padding, which may be rough.
        """
        pairs = [(terms, Jv[0]) for terms, Jv in zip(self.part.terms, tangents, strict=True)]
        vectors = [terms.weigh(Jv) for terms, Jv in pairs]
        forward = sum(
            float((r.double() * Jv.double()).sum())
            for r, (_, Jv) in zip(vectors, pairs, strict=True)
        )
        # A graph of its own: finite differences have written to the parameters that this one was made of.
        backward = float(dot(Traced(self._network, self.part).vjp(vectors), direction))
        if not (math.isfinite(forward) and math.isfinite(backward)):
            return True  # such a step is refused
        return abs(forward - backward) <= TOLERANCE * max(abs(forward), abs(backward))

    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        parameters = self._network.parameters
        grads = self._backward(vectors, parameters)
        return self._network.join(
            [
                torch.zeros_like(p) if g is None else g
                for p, g in zip(parameters, grads, strict=True)
            ]
        )

    def _backward(
        self, vectors: Sequence[Tensor | None], wanted: Sequence[object]
    ) -> list[Tensor | None]:
        if not wanted or all(r is None for r in vectors):
            return [None] * len(wanted)
        pairs = [(z, r) for z, r in zip(self._graph[0], vectors, strict=True) if r is not None]
        ends, cotangents = zip(*pairs, strict=True)
        return list(
            torch.autograd.grad(
                ends,
                wanted,  # type: ignore[arg-type]
                cotangents,
                retain_graph=True,
                allow_unused=True,
            )
        )
