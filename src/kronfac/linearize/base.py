"""The network around θ on one micro-batch: outputs f, J v and Jᵀ r.

All derivatives of the network that a step needs come from here. Layouts: the outputs z of a loss call are
(terms, event), J v of k directions is (k, terms, event), and vectors r are like the outputs.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from kronfac.curvature import SummedGradient, Taps
from kronfac.curvature.estimate import Tapped
from kronfac.distributed import ALONE, World
from kronfac.errors import out_of_memory
from kronfac.linearize.by_hand import ByHand, trace_of
from kronfac.model import Matrices, Network, Uses, dot, record_uses
from kronfac.model.side_effects import unseen_writes
from kronfac.record import Batch, Pass
from kronfac.warn import warn

TOLERANCE = 0.01
"""The largest relative difference of rᵀJv and (Jᵀr)ᵀv: finite differences are off by 1e-3 in float32."""
LENGTHS = (1.0, 0.125, 0.015625)
"""Lengths of finite differences, relative to the usual one, to try until J v agrees with the gradient."""
SHARE = 0.0625
"""The scale of the parameters that v changes, relative to ‖θ‖: embeddings of 0.02 stand beside 1s."""
WRONG_TANGENTS = (
    "The curvature along a step does not agree with the gradient, so steps may be too long or too short. "
    "The closure or the model uses a parameter where KFAC does not see it, or with another derivative than "
    "its value has (a parameter used outside of the model, a custom autograd function, detached values). "
    "Compute everything that uses parameters in the model's forward."
)


class Linearization(Tapped, Protocol):
    """f, J v and Jᵀ r of one micro-batch."""

    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        """J v of every loss call, for all directions."""

    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        """Jᵀ r, summed over the examples."""


def linearize(network: Network, part: Pass) -> Linearization:
    """The network around θ on one micro-batch: by hand if it is a perceptron, else by torch."""
    trace = None if network.convolutional else trace_of(network, part)
    return Traced(network, part) if trace is None else ByHand(part, trace)


def fisher_gram(
    network: Network,
    batch: Batch,
    directions: Sequence[Matrices],
    factor: float = 1.0,
    world: World = ALONE,
) -> Tensor:
    """The matrix of v_iᵀ F v_j for all pairs of directions, (k, k), float64, on the device.

    F = Σ_t s w_t J_tᵀ F_R J_t, so uᵀFv = Σ_t s w_t (J_t u)ᵀ F_R (J_t v): J v of all directions, and no
    backward pass [MG15 App. C].

    Args:
        network: the network.
        batch: the examples.
        directions: the vectors.
        factor: the weight of the terms.
        world: the ranks that each have a part of the examples.
    """
    gram: Tensor | None = None
    for part in batch.passes:
        view = linearize(network, part)
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
    network: Network, batch: Batch, vector: Matrices, factor: float = 1.0, world: World = ALONE
) -> Matrices:
    """F v = Jᵀ F_R J v: the forward-mode pass, and a backward pass from F_R J v."""
    total = tuple(torch.zeros_like(V) for V in vector)
    for part in batch.passes:
        view = linearize(network, part)
        products = [
            terms.weigh(terms.likelihood.fisher_product(z, Jv[0]))
            for terms, z, Jv in zip(part.terms, view.outputs, view.jvp([vector]), strict=True)
        ]
        for sum_, V in zip(total, view.vjp(products), strict=True):
            sum_.add_(V, alpha=factor)
    world.sum(total, "fisher")
    return total


class Traced:
    """By torch: the graph of one forward pass, made when it is first needed."""

    def __init__(self, network: Network, part: Pass) -> None:
        self.part = part
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
        """The outputs z of every loss call, in the shape that the loss received."""
        return self._graph[1]

    @property
    def outputs(self) -> Sequence[Tensor]:
        """The outputs from a pass for J v if there was one, else from the graph."""
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
        """The taps; autograd computes no gradients of weights whose uses are recorded."""
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
        # Compared until the optimizer has taken a step.
        if not learned.compared and not self._consistent(directions[0], found):
            return self._by_differences(directions)
        return found

    def _by_differences(self, directions: Sequence[Matrices]) -> list[Tensor]:
        """J v by the longest differences that agree with the gradient; warn if none do.

        At θ ± εv an example may take another path than at θ, such as to another expert. That is rarer for
        smaller ε, whereas a wrong derivative is as wrong at every ε.
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
        """Whether rᵀ(J v) = (Jᵀ r)ᵀ v for r = w ⊙ J v, up to the error of finite differences.

        The weights w of the terms leave out padding, where outputs need not be smooth.
        """
        pairs = [(terms, Jv[0]) for terms, Jv in zip(self.part.terms, tangents, strict=True)]
        vectors = [terms.weigh(Jv) for terms, Jv in pairs]
        forward = sum(
            float((r.double() * Jv.double()).sum())
            for r, (_, Jv) in zip(vectors, pairs, strict=True)
        )
        # A new graph: finite differences have written to the parameters of the old one.
        backward = float(dot(Traced(self._network, self.part).vjp(vectors), direction))
        if not (math.isfinite(forward) and math.isfinite(backward)):
            return True  # the step is refused elsewhere
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


# ------------------------------------------------------------------------------------------ f and J v


def outputs_and_jvp(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return raw outputs and J v, (k, …), for every loss call, by forward mode if the network has it."""
    if network.learned.forward_mode:
        try:
            return by_forward_mode(network, part, directions)
        except (NotImplementedError, RuntimeError) as error:
            # An operation without a forward-mode derivative; any other error is raised again below.
            lasts = not out_of_memory(error)
        found = by_differences(network, part, directions)
        network.learned.forward_mode = not lasts
        return found
    return by_differences(network, part, directions)


@torch.no_grad()
def by_differences(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, up to ε², and J v there, (k, …), for any forward pass.

    J v ≈ (f(θ + εv) − f(θ − εv)) / 2ε, with the same random numbers in both passes. The error is of order
    ε² from curvature and of order precision / ε from rounding. The two balance if ε ‖v‖ is the cube root of
    the precision times the scale of the parameters that v changes. That is less than ‖θ‖, which the weights
    of 1 in normalisation layers dominate. Kinks (ReLU) between the two points add an error proportional to
    ε. A jump, where an example goes to another expert, adds its height over ε, and is rarer for a smaller
    ε: `Traced` tries a smaller one if J v does not agree with the gradient.
    """
    theta = network.theta()
    size = float(dot(theta, theta)) ** 0.5 or 1.0
    precision: float = (
        SHARE * torch.finfo(network.dtype).eps ** (1 / 3) * network.learned.difference
    )
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        norm = float(dot(direction, direction)) ** 0.5
        epsilon = precision * size / norm if norm > 0 else 1.0
        with unseen_writes(network.parameters):
            with network.displaced(direction, epsilon):
                above = part.run(network.model)
            with network.displaced(direction, -epsilon):
                below = part.run(network.model)
        found.append([(a - b) / (2 * epsilon) for a, b in zip(above, below, strict=True)])
        values = [(a + b) / 2 for a, b in zip(above, below, strict=True)]
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]


@torch.no_grad()
def by_forward_mode(
    network: Network, part: Pass, directions: Sequence[Matrices]
) -> tuple[list[Tensor], list[Tensor]]:
    """The raw outputs of every loss call, and J v there, (k, …), with dual numbers as parameters.

    θ and its tangent go through one pass. Torch functions receive dual numbers in place of parameters, in
    this thread only. So the model may use its parameters in any way, and other threads that evaluate it are
    not affected.

    Raises:
        NotImplementedError, RuntimeError: an operation has no forward-mode derivative.
    """
    _load_decompositions()
    found: list[list[Tensor]] = []
    values: list[Tensor] = []
    for direction in directions:
        # At its end all tangents are removed, also if the pass fails.
        with forward_ad.dual_level():
            pairs = zip(network.parameters, network.split(direction), strict=True)
            # Copies, in case the forward pass writes to its parameters.
            duals = {id(p): forward_ad.make_dual(p.detach().clone(), v) for p, v in pairs}
            # No graph is made: dual numbers need no gradients.
            with torch.enable_grad(), DualParameters(duals):
                outputs = part.run(network.model)
            unpacked = [forward_ad.unpack_dual(z) for z in outputs]
            values = [z.detach() for z, _ in unpacked]
            found.append([torch.zeros_like(z) if Jv is None else Jv for z, Jv in unpacked])
    return values, [torch.stack(tangents) for tangents in zip(*found, strict=True)]


class DualParameters(TorchFunctionMode):
    """Replaces parameters, by their ids, in the arguments of this thread's torch functions."""

    def __init__(self, duals: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._duals = duals

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {name: self._replace(value) for name, value in (kwargs or {}).items()}
        # As in backward mode, what a model computes without gradients is a constant.
        with nullcontext() if torch.is_grad_enabled() else forward_ad._set_fwd_grad_enabled(False):
            return func(*map(self._replace, args), **given)

    def _replace(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._duals.get(id(value), value)
        if type(value) in (list, tuple):  # the weights of recurrent layers
            return type(value)(map(self._replace, value))
        return value


@cache
def _load_decompositions() -> None:
    """Make the first dual number, for which torch loads further code, without torch's own warning.

    That code calls the deprecated `torch.jit.script`, and would raise with `python -W error`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))
