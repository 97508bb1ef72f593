"""J as a matrix, from the statistics' own backward pass, for models with one output number per example.

A backward pass from r, with a number r_n for example n, shows ā and g of every use. The part of example n
in the gradient is r_n times its row of J,

    J_n = (1 / r_n) Σ_uses Σ_places g āᵀ,

so that J v and Jᵀ r on the same examples are products with a matrix, and need no pass. This is for small
networks, whose passes are mostly overhead. Layout: J is (examples, parameters), unit after unit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient, Taps
from kronfac.curvature.taps import WORK_SPACE
from kronfac.distributed import ALONE, World
from kronfac.linearize.base import Linearization, Traced
from kronfac.linearize.by_hand import ByHand, trace_of
from kronfac.model import Matrices, Network
from kronfac.record import Batch, Pass
from kronfac.record.examples import norms_in_training


def linearize(network: Network, part: Pass) -> Linearization:
    """The network around θ on one micro-batch: by hand if it is a perceptron, else by torch."""
    trace = trace_of(network, part)
    return Traced(network, part) if trace is None else ByHand(part, trace)


class Linearizer:
    """The network around θ on the micro-batches of one step.

    Args:
        network: the network.
        keeps: whether to keep J of the statistics' examples, if possible.
    """

    def __init__(self, network: Network, keeps: bool = False) -> None:
        self._network, self._keeps = network, keeps
        self._kept: list[Explicit] = []

    def __call__(self, part: Pass) -> Linearization:
        """The network around θ on a micro-batch; with J as a matrix if it was kept for these examples."""
        for view in self._kept:
            if view.part is part:
                return view
        return linearize(self._network, part)

    def for_statistics(self, part: Pass) -> Linearization:
        """The network around θ on a micro-batch of the statistics; keep its J if possible."""
        view = linearize(self._network, part)
        if not self._keeps or not isinstance(view, Traced):
            return view
        kept = Explicit(self._network, view)
        self._kept.append(kept)
        return kept

    def fisher_gram(
        self,
        batch: Batch,
        directions: Sequence[Matrices],
        factor: float = 1.0,
        world: World = ALONE,
    ) -> Tensor:
        """The matrix of v_iᵀ F v_j for all pairs of directions, (k, k), float64, on the device.

        F = Σ_t s w_t J_tᵀ F_R J_t, so uᵀFv = Σ_t s w_t (J_t u)ᵀ F_R (J_t v): J v of all directions, and no
        backward pass [MG15 App. C].

        Args:
            batch: the examples.
            directions: the vectors.
            factor: the weight of the terms.
            world: the ranks that each have a part of the examples.
        """
        gram: Tensor | None = None
        for part in batch.passes:
            view = self(part)
            tangents = view.jvp(directions)
            for terms, z, Jv in zip(part.terms, view.outputs, tangents, strict=True):
                scale = terms.scale or 1.0
                FJv = terms.weigh(terms.likelihood.fisher_product(z, Jv), scale)
                own = (Jv.flatten(1) @ FJv.flatten(1).mT).double().mul_(scale)
                gram = own if gram is None else gram.add_(own)
        assert gram is not None
        if world.size > 1:
            totals = world.total(gram.flatten().tolist(), "fisher")
            gram = torch.tensor(totals, dtype=gram.dtype, device=gram.device).view_as(gram)
        # It is symmetric up to rounding, as F_R is applied to one side only.
        return (gram + gram.mT).mul_(factor / 2)

    def fisher_product(
        self, batch: Batch, vector: Matrices, factor: float = 1.0, world: World = ALONE
    ) -> Matrices:
        """F v = Jᵀ F_R J v: the forward-mode pass, and a backward pass from F_R J v."""
        total = tuple(torch.zeros_like(V) for V in vector)
        for part in batch.passes:
            view = self(part)
            products = [
                terms.weigh(terms.likelihood.fisher_product(z, Jv[0]))
                for terms, z, Jv in zip(part.terms, view.outputs, view.jvp([vector]), strict=True)
            ]
            for sum_, V in zip(total, view.vjp(products), strict=True):
                sum_.add_(V, alpha=factor)
        world.sum(total, "fisher")
        return total


class Explicit(Linearization):
    """Uses another linearization until a backward pass has given J, then J."""

    def __init__(self, network: Network, view: Linearization) -> None:
        super().__init__(view.part)
        self._network = network
        self._view: Linearization | None = view
        self._outputs: Sequence[Tensor] = ()
        self._J: Tensor | None = None

    @property
    def _passes(self) -> Linearization:
        """The other linearization, made again if its graph was freed."""
        return linearize(self._network, self.part) if self._view is None else self._view

    @property
    def outputs(self) -> Sequence[Tensor]:
        return self._passes.outputs if self._J is None else self._outputs

    @property
    def summed(self) -> bool:
        return self._passes.summed

    def taps(self, vectors: Sequence[Tensor | None]) -> Sequence[Taps]:
        """Taps of the backward pass; the first ones give J."""
        view = self._passes
        taps = view.taps(vectors)
        if self._J is None and not view.summed:
            self._J = _jacobian(self._network, self.part, taps, vectors[0])
            self._outputs = [z.clone() for z in view.outputs]
        return taps

    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        if self._J is None:
            return self._passes.jvp(directions)
        self._view = None  # and with it the graph
        V = torch.stack([torch.cat([U.reshape(-1) for U in v]) for v in directions])
        return [(V @ self._J.mT).unsqueeze(-1)]

    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        r = vectors[0]
        if self._J is None or r is None:
            return self._passes.vjp(vectors)
        shapes = [unit.shape for unit in self._network.units]
        parts = (r.squeeze(-1) @ self._J).split([math.prod(shape) for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def can_be_explicit(network: Network, batch: Batch) -> bool:
    """Whether one backward pass gives J of these examples as a matrix, and J is small.

    Every example must have one output, which depends on no other example, and all uses of parameters must
    be recorded. It is False until J v has been compared with Jᵀ r, which shows faults of the network.
    """
    if not (network.learned.compared and network.learned.forward_mode):
        return False
    size = sum(p.numel() for p in network.parameters)
    return (
        batch.examples * size <= WORK_SPACE
        and all(unit.observed for unit in network.units)
        and all(map(_scalar, batch.passes))
        and not norms_in_training(network.model)
        and all(part.apart for part in batch.passes)
    )


def _scalar(part: Pass) -> bool:
    """Whether there is one loss call, with one output per example."""
    if len(part.terms) != 1:
        return False
    (terms,) = part.terms
    return terms.event == 1 and terms.count == part.examples


def _jacobian(
    network: Network, part: Pass, taps: Sequence[Taps], r: Tensor | None
) -> Tensor | None:
    """J, (examples, parameters); None if this backward pass does not give it."""
    if r is None or not bool((r != 0).all()):
        return None
    columns: list[Tensor] = []
    for unit, uses in zip(network.units, taps, strict=True):
        if isinstance(uses, SummedGradient) or any(tap.examples != part.examples for tap in uses):
            return None
        total = r.new_zeros(part.examples, math.prod(unit.shape))
        for tap in uses:
            total += tap.gradients().flatten(1)
        columns.append(total)
    return torch.cat(columns, dim=1).div_(r)
