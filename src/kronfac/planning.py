"""What K-FAC will do with a network, without a step: blocks, bytes of state, cost of a step.

`plan` calls the model once with an example, takes a few of its examples through K-FAC's own passes, counts
what these make and multiply, and leaves everything as it was.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from kronfac.check import missing_uses
from kronfac.control import Measurement
from kronfac.curvature import (
    DiagonalBlock,
    EigenvalueCorrectedInverse,
    ExactFisher,
    GroupedTap,
    InverseCost,
    KroneckerBlock,
    Moments,
    SummedGradient,
    Tap,
    Taps,
)
from kronfac.errors import ExampleError, UnsupportedModelError
from kronfac.kfac import KFAC
from kronfac.linearize import ByHand, Traced, linearize
from kronfac.model import Network, RandomState, Unit, replay, restore
from kronfac.model.nested import tensors_of
from kronfac.model.side_effects import Context, full_precision
from kronfac.record import Batch, Pass, record, sizes, subsets
from kronfac.record.discovery import discover, find_chains
from kronfac.record.examples import check_examples
from kronfac.settings import LONGEST_INTERVAL, Settings
from kronfac.step.examples import shares
from kronfac.storage import tensors_in

T = TypeVar("T")

BY_HAND, FORWARD_MODE, FINITE_DIFFERENCES = "by hand", "forward mode", "finite differences"
FEW = 8
"""Examples that are counted, if the mini-batch can be divided into examples."""
FIRST, LATER = range(2, 102), range(101, 201)
"""Iterations that show what the rules ask for at first, and how often once they have settled."""
CALL = 7e5
"""Multiplications of large matrix products that take as long as one call of a torch function, with autograd
and the Python around it, on a CPU. `kronfac bench network-step` compares plans with measurements."""
UPDATE_CALLS, STEP_CALLS, REFRESH_CALLS, PRODUCT_CALLS = 4, 40, 10, 3
"""Calls of SGD's update, of a step besides its passes, of a unit's damped inverse and of its product."""
WITHOUT_GRAPH = 0.4
"""What a call counts in passes that make no graph: by finite differences, and by hand."""
FUSED = 0.6
"""Time of the products in a fused kernel, such as oneDNN's LSTM, as a share of the same one by one."""


@dataclass(frozen=True)
class Row:
    """The plan for the parameters of one unit, which share a block."""

    name: str
    """The layer's path in the model, or the parameter's."""
    parameters: tuple[str, ...]
    """Full names of the parameters."""
    shape: tuple[int, int]
    """(rows, columns) of the matrix V that they form."""
    block: str
    """Its curvature block, such as `"Kronecker (64, 33)"` or `"dense, 2 pieces"`."""
    factors: str
    """The estimated matrices and their sizes, such as `"A 33×33, G 64×64"`."""
    state: int
    """Bytes kept from step to step: statistics, inverse, momentum and the copies that undo a step."""
    cost: float
    """SGD steps that its statistics and its inverse cost in a step, without passes through the network."""
    fallback: bool = False
    """Whether it has a diagonal block, or its uses are not seen."""
    why: str = ""
    """Why it has no better block."""

    @property
    def count(self) -> int:
        """The number of parameters."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Plan:
    """What K-FAC will do with a network; `str` makes a page of it."""

    model: str
    """The type of the model."""
    rows: tuple[Row, ...]
    """One for every unit."""
    cost: Mapping[str, float]
    """SGD steps that a step costs, by part; each is a forward pass, a backward pass and an update."""
    engine: str
    """How Fisher products are computed: `"by hand"`, `"forward mode"` or `"finite differences"`."""
    examples: int
    """Examples of the mini-batch."""
    statistics_examples: int
    """Those that the statistics are estimated on."""
    fisher_examples: int
    """Those that the Fisher products are computed on."""
    chains: tuple[tuple[str, ...], ...] = ()
    """The units of every chain that the tridiagonal inverse inverts as a whole."""

    @property
    def state(self) -> int:
        """Bytes of state of all units."""
        return sum(row.state for row in self.rows)

    @property
    def sgd_steps(self) -> float:
        """The cost of a step in SGD steps."""
        return sum(self.cost.values())

    @property
    def fallbacks(self) -> tuple[Row, ...]:
        """The units that have a diagonal block, or whose uses are not seen."""
        return tuple(row for row in self.rows if row.fallback)

    def __str__(self) -> str:
        parameters = sum(row.count for row in self.rows)
        lines = [
            f"K-FAC's plan for {self.model}: {parameters:,} parameters in {len(self.rows)} units",
            "",
            *_table(self.rows),
            "",
        ]
        reasons = [f"  {row.name!r}: {row.block}: {row.why}" for row in self.rows if row.why]
        if reasons:
            lines += ["Because:", *reasons]
        if self.chains:
            lines += ["Inverted together:", *(f"  {' → '.join(chain)}" for chain in self.chains)]
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.cost.items())
        lines += [
            f"Fisher products: {self.engine}, on {self.fisher_examples} of {self.examples} examples; "
            f"statistics on {self.statistics_examples}",
            f"A step costs {self.sgd_steps:.1f} SGD steps: {parts}",
            f"State: {readable(self.state)}",
        ]
        return "\n".join(lines)


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [("unit", "parameters", "block", "factors", "state", "cost")]
    cells += [
        (r.name, f"{r.count:,}", r.block, r.factors, readable(r.state), f"{r.cost:.2f}")
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = (str.ljust, str.rjust, str.ljust, str.ljust, str.rjust, str.rjust)
    return [
        "  ".join(put(cell, width) for put, cell, width in zip(align, line, widths, strict=True))
        for line in cells
    ]


def readable(count: int) -> str:
    """A number of bytes as people read it, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


# ---------------------------------------------------------------------------------------------- plan


def plan(
    model: nn.Module, loss: nn.Module, example: Any, targets: Any = None, **settings: Any
) -> Plan:
    """What `KFAC(model, loss, **settings)` would do with mini-batches like the example.

    No step is taken; parameters, gradients, buffers and random numbers stay as they are.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> print(plan(model, nn.MSELoss(), torch.randn(64, 2)).engine)
        by hand

    Args:
        model: to be trained; frozen parameters stay frozen.
        loss: as for `KFAC`.
        example: a mini-batch as the model is called with: a tensor, a tuple of arguments, or a dict of
            keyword arguments.
        targets: for the loss. None if the model computes its loss itself, or if they are not known: the
            loss module and the model's outputs are usually enough.
        **settings: those of `KFAC`.

    Raises:
        ExampleError: the model can't be called with the example, or the targets don't fit.
        UnsupportedModelError: `KFAC` would refuse the model, or its parameters have no values.
    """
    optimizer = KFAC(model, loss, **settings)
    optimizer.close()
    network = optimizer.network
    if network.device.type == "meta":
        raise UnsupportedModelError(
            "kronfac.plan runs the model, and can't run one on the meta device. Plan for a narrower model "
            "of the same kind."
        )
    weight_decay = max(group["weight_decay"] for group in optimizer.param_groups)
    with (
        _untouched(network),
        full_precision(network.device) as callers,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", UserWarning)  # the plan says the same
        batch = record_example(model, network, example, targets, callers)
        return _plan(network, batch, optimizer.settings, weight_decay)


def _plan(network: Network, batch: Batch, settings: Settings, weight_decay: float) -> Plan:
    """The plan for mini-batches like this one."""
    batch = check_examples(network, batch)
    found = count_passes(discover(network, batch.passes[0]), batch, settings)
    network = found.network
    chains = find_chains(network, batch.passes[0]) if settings.inverse.couples else []
    pieces = [piece for piece in chains if len(piece) > 1]
    following = {n: after for piece in pieces for n, after in pairwise(piece)}
    validates = any(settings.damping.measures(k) == "next" for k in FIRST)
    rejects = validates and settings.acceptance.rejection is not None
    vectors = 3 if rejects else 1  # momentum; and what undoes a step
    costs, numbers = [], []
    for n, unit in enumerate(network.units):
        moments = found.moments[n]
        cost = settings.inverse.cost(moments)
        held = sum(t.numel() for t in tensors_in(moments)) + vectors * math.prod(unit.shape)
        if n in following:
            after = network.units[following[n]].shape
            cost = cost + settings.inverse.cost_between(unit.shape, after)
            held += sum(a * b for a, b in zip(unit.shape, after, strict=True))
        costs.append(cost)
        numbers.append(held + cost.numbers)
    S1, S2 = _curvature_examples(network, batch, settings)
    tried = _candidates(settings, weight_decay)
    cost_by_part, cost_by_unit = _cost(settings, found, costs, (batch.examples, S1, S2), tried)
    rows = [
        Row(
            name=unit.name,
            parameters=unit.names,
            shape=unit.shape,
            block=unit.block.describe(*unit.shape),
            factors=_sizes(found.moments[n]),
            state=unit.parameters[0].element_size() * numbers[n],
            cost=cost_by_unit[n],
            fallback=isinstance(unit.block, DiagonalBlock) or not unit.observed,
            why=_why(network, unit),
        )
        for n, unit in enumerate(network.units)
    ]
    return Plan(
        model=type(network.model).__name__,
        rows=tuple(rows),
        cost=cost_by_part,
        engine=found.engine,
        examples=batch.examples,
        statistics_examples=S1,
        fisher_examples=S2,
        chains=tuple(tuple(network.units[n].name for n in piece) for piece in pieces),
    )


def _why(network: Network, unit: Unit) -> str:
    """Why a unit has no better block."""
    block, blocks = unit.block, network.blocks
    if unit.why:
        return unit.why
    if isinstance(block, DiagonalBlock):
        return f"it is too large for dense blocks of {blocks.dense_limit} parameters"
    diagonal = isinstance(block, KroneckerBlock) and (block.diagonal_grads or block.diagonal_inputs)
    if diagonal and max(unit.shape) > blocks.wide_limit:
        return f"one side is wider than {blocks.wide_limit}, and has a diagonal factor"
    return ""


def _candidates(settings: Settings, weight_decay: float) -> int:
    """How many γ a refresh tries once λ has settled."""
    m = Measurement(lambda_=1.0, weight_decay=weight_decay)
    state = settings.gamma.init(m)
    return max(len(settings.gamma.candidates(state, replace(m, iteration=k))) for k in LATER)


def _curvature_examples(network: Network, batch: Batch, settings: Settings) -> tuple[int, int]:
    """How many examples S₁ and S₂ have."""
    fractions = shares(settings.intervals, batch.examples, batch.most_terms, network.convolutional)
    if batch.random and not batch.traced:
        fractions = fractions[1], fractions[1]
    S1, S2 = subsets(network, batch, sizes(batch.examples, *fractions), None)
    return S1.examples, S2.examples


def _sizes(moments: Moments) -> str:
    named = [(name, value) for name, value in vars(moments).items() if isinstance(value, Tensor)]
    return ", ".join(f"{name} {'×'.join(map(str, value.shape))}" for name, value in named)


# ---------------------------------------------------------------------------------------------- cost


class Work(TorchDispatchMode):
    """Counts the multiplications of matrix products and convolutions, and calls of torch functions."""

    def __init__(self, examples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.examples = examples
        self.multiplications = 0.0
        self.calls = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls += not func.is_view
        # Products in place and attention on CPUs are in the registry under other names.
        name = func._overloadpacket.__name__.rstrip("_").replace("_for_cpu", "")
        counter: Callable[..., int] | None = flop_registry.get(getattr(torch.ops.aten, name, None))
        if counter is not None:
            self.multiplications += counter(*args, **kwargs, out_val=result) / 2
        return result

    def on(self, examples: float) -> float:
        """The work with so many examples, in multiplications."""
        return self.multiplications * examples / self.examples + CALL * self.calls


@dataclass(frozen=True)
class Counts:
    """The work of a step's passes by a few examples."""

    network: Network
    """With diagonal blocks for units whose uses are not all seen."""
    moments: list[Moments]
    """Of every unit."""
    observed: list[Work]
    """What made the moments of every unit."""
    products: list[float]
    """Multiplications of V with its inputs for an example, for every unit."""
    gradient: Work
    """A forward and a backward pass."""
    forward: Work
    again: Work
    """The forward pass of the statistics; none by hand, as `KFAC.closure` has kept that of the gradient."""
    backward: Work
    """The backward pass of the statistics for one vector, without products for weights."""
    tangents: Work
    """J v of the directions that the step is combined from."""
    outputs: int
    """Outputs of an example, over all loss calls."""
    engine: str


def _cost(
    settings: Settings,
    counts: Counts,
    inverses: Sequence[InverseCost],
    m: Sequence[int],
    tried: int,
) -> tuple[Mapping[str, float], list[float]]:
    """The cost of a step in SGD steps, by part, and that of every unit's statistics and inverse.

    Args:
        settings: of `KFAC`.
        counts: by `count_passes`.
        inverses: what every unit's inverse takes.
        m: examples of the mini-batch, of S₁ and of S₂.
        tried: candidates for γ that a refresh tries.
    """
    size = sum(p.numel() for p in counts.network.parameters)
    sgd = counts.gradient.on(m[0]) + size + CALL * UPDATE_CALLS
    draws = counts.outputs if isinstance(settings.fisher, ExactFisher) else settings.fisher.draws
    ekfac = isinstance(settings.inverse, EigenvalueCorrectedInverse)
    # EKFAC transforms inputs and gradients to the eigenbasis, and multiplies them for every example.
    moments = [
        draws * (made.on(m[1]) + (made.on(m[1]) + uses * m[1]) * ekfac)
        for made, uses in zip(counts.observed, counts.products, strict=True)
    ]
    interval = settings.intervals.inverse_interval or LONGEST_INTERVAL
    made = 1 if ekfac else tried  # eigenvectors do not depend on γ
    inversions = [made * (cost.inversion + CALL * REFRESH_CALLS) / interval for cost in inverses]
    often = 1 + (tried - 1) / interval
    products = [often * (cost.product + CALL * PRODUCT_CALLS) for cost in inverses]
    validations = sum(settings.damping.measures(k) is not None for k in LATER) / len(LATER)
    saved = (1 - WITHOUT_GRAPH) * CALL * counts.gradient.calls  # by hand, as `KFAC.closure` is
    parts = {
        "gradient": sgd - saved if counts.engine == BY_HAND else sgd,
        "statistics": counts.again.on(m[1]) + draws * counts.backward.on(m[1]) + sum(moments),
        "Fisher products": counts.tangents.on(m[2]),
        "refreshes": sum(inversions),
        "preconditioning": sum(products),
        "validation": validations * counts.forward.on(m[0]),
        "the rest": CALL * STEP_CALLS,
    }
    units = [sum(each) / sgd for each in zip(moments, inversions, products, strict=True)]
    return MappingProxyType({name: value / sgd for name, value in parts.items()}), units


@torch.no_grad()
def count_passes(network: Network, batch: Batch, settings: Settings) -> Counts:
    """Take the first few examples of a mini-batch through the passes of a step, and count them."""
    (some,) = subsets(network, batch, [min(FEW, batch.examples)], None)
    part = some.passes[0]  # micro-batches are alike
    n = max(part.examples, 1)

    def counted(run: Callable[[], T]) -> tuple[T, Work]:
        with Work(n) as work:
            result = run()
        return result, work

    network, engine = _tried_out(network, part)
    view = Traced(network, part)
    outputs, again = counted(lambda: view.outputs)
    vectors = [torch.ones_like(z) for z in outputs]
    taps, backward = counted(lambda: view.taps(vectors))
    shown = [own or network.unused(number) for number, own in enumerate(taps)]
    pairs = [
        counted(partial(unit.block.observe, own, 1.0))
        for unit, own in zip(network.units, shown, strict=True)
    ]
    products = [
        math.prod(unit.shape) * _columns(own) / n
        for unit, own in zip(network.units, shown, strict=True)
    ]
    _, forward = counted(lambda: part.run(network.model))
    _, gradient = counted(lambda: _gradient(network, part))
    directions = [network.theta()] * (1 + settings.step_rule.momentum)
    around = linearize(network, part)
    _, tangents = counted(lambda: around.jvp(directions))
    if engine == BY_HAND:
        again = Work(n)
        _, backward = counted(lambda: around.taps(vectors))
        backward.calls *= WITHOUT_GRAPH
    else:
        # Torch does not count all fused kernels, but each weight is multiplied at least once.
        size = sum(p.numel() for p in network.parameters)
        least = max(n * sum(products), float(part.examples * size))
        unseen = max(least - forward.multiplications, 0.0)
        fused = FUSED * unseen
        forward.multiplications += fused
        gradient.multiplications += 3 * fused
        for work in (again, backward):
            work.multiplications = max(work.multiplications, least)
        if engine == FINITE_DIFFERENCES:
            tangents.multiplications += 2 * len(directions) * fused
            tangents.calls *= WITHOUT_GRAPH
    repeated = (len(directions) + settings.step_rule.cg_steps - 1) / len(directions)
    tangents.multiplications *= repeated
    tangents.calls *= repeated
    return Counts(
        network=network,
        moments=[moments for moments, _ in pairs],
        observed=[work for _, work in pairs],
        products=products,
        gradient=gradient,
        forward=forward,
        again=again,
        backward=backward,
        tangents=tangents,
        outputs=round(sum(z.numel() for z in outputs) / n),
        engine=engine,
    )


def _tried_out(network: Network, part: Pass) -> tuple[Network, str]:
    """The network with what the first step finds out about it, and how J v is computed."""
    view = Traced(network, part)
    vectors = [torch.randn_like(z) for z in view.outputs]
    precision = torch.finfo(network.dtype).eps
    network = network.demoted(
        missing_uses(view, vectors, view.taps(vectors), precision),
        "its gradient is not the one rebuilt from the uses that are seen",
    )
    if isinstance(linearize(network, part), ByHand):
        return network, BY_HAND
    learned = network.learned.copy()
    network = replace(network, learned=learned)
    Traced(network, part).jvp([network.theta()])
    learned.compared = True
    return network, FORWARD_MODE if learned.forward_mode else FINITE_DIFFERENCES


@torch.enable_grad()
def _gradient(network: Network, part: Pass) -> None:
    """A forward and a backward pass, as for SGD."""
    outputs = [z for z in part.run(network.model) if z.requires_grad]
    ones = [torch.ones_like(z) for z in outputs]
    torch.autograd.grad(outputs, network.parameters, ones, allow_unused=True)


def _columns(taps: Taps) -> int:
    """How many vectors V was multiplied with; for products of numbers one by one, none."""
    if isinstance(taps, SummedGradient):
        return 0
    shapes = [tap.grads.shape for tap in taps if isinstance(tap, Tap | GroupedTap)]
    return sum(examples * places for *_, examples, places, _ in shapes)


# ------------------------------------------------------------------------------------------- example


@contextmanager
def _untouched(network: Network) -> Iterator[None]:
    """Restore buffers and random numbers."""
    kept = network.buffers.before_call("")
    try:
        with replay(RandomState.current(network.device)):
            yield
    finally:
        # Only buffers that were written to: graphs that others have made of the rest stay valid.
        restore(network.buffers.written(kept))


def record_example(
    model: nn.Module, network: Network, example: Any, targets: Any, callers: Context
) -> Batch:
    """The record of a closure that calls the model with this example.

    Args:
        model: to be called; `network.model` is the module inside, if that is compiled.
        network: the trained units.
        example: see `plan`.
        targets: see `plan`.
        callers: the context that the model is to be called in, see `model/side_effects.py`.

    Raises:
        ExampleError: the model can't be called so, or its outputs do not fit the loss.
    """
    args, kwargs = (example if type(example) is tuple else (example,)), {}
    if isinstance(example, Mapping):
        args, kwargs = (), dict(example)
    try:
        with record(model, network.objective, network.buffers) as recording, torch.enable_grad():
            with callers():
                outputs = model(*args, **kwargs)
                loss = _loss(network, outputs, targets, seen=bool(recording.losses))
            if loss is not None and loss.requires_grad:
                # For the gradients that arrive at the loss calls; none are left in the parameters.
                torch.autograd.grad(loss, network.parameters, allow_unused=True)
        return recording.batch()
    except Exception as error:
        raise ExampleError(
            "kronfac.plan calls the model with the example, as training does: a tensor, a tuple of "
            "arguments or a dict of keyword arguments. The loss gets the outputs, which need gradients, "
            f"and the targets. {type(model).__name__} got {_described(example)}, and "
            f"{type(network.objective.module).__name__} got {_described(targets)} as targets: "
            f"{type(error).__name__}: {error} Pass what you call the model with, and targets that fit, or "
            "none."
        ) from error


def _loss(network: Network, outputs: Any, targets: Any, *, seen: bool) -> Tensor | None:
    """The loss of the outputs; that of a model that computes it itself is the first single number."""
    if targets is None:
        single = (t for t in tensors_of(outputs) if t.numel() == 1 and t.requires_grad)
        return next(single, None) if seen else None
    return network.objective.loss(outputs, targets).sum()


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(value))
    return f"a {type(value).__name__} with tensors {shapes}" if shapes else f"{value!r}"
