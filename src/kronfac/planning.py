"""What K-FAC will do with a network, without a step: blocks, bytes of state, cost of a step.

`plan` calls the model once with an example, takes a few of its examples through K-FAC's own passes, counts
what these make and multiply, and leaves everything as it was.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    AnyTap,
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
from kronfac.errors import ExampleError, KronfacError
from kronfac.kfac import KFAC
from kronfac.linearize import ByHand, Traced, linearize
from kronfac.linearize.base import WRONG_TANGENTS
from kronfac.model import Matrices, Network, RandomState, Unit, replay, restore
from kronfac.model.nested import tensors_of
from kronfac.model.network import Learned
from kronfac.model.own_pass import Context, full_precision
from kronfac.record import Batch, Pass, record, sizes, subsets
from kronfac.record.chain import find_chains
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples
from kronfac.settings import LONGEST_INTERVAL, Settings
from kronfac.storage import tensors_in

T = TypeVar("T")

FEW = 8
"""Examples that are counted, if the mini-batch can be divided into examples."""
FIRST, LATER = range(2, 102), range(101, 201)
"""Iterations that show what the rules ask for at first, and how often once they have settled."""
BY_HAND, FORWARD_MODE, FINITE_DIFFERENCES = "by hand", "forward mode", "finite differences"


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
    unchained: str = ""
    """Why no other unit precedes it in a chain, with the tridiagonal inverse."""

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
    noise: int
    """Bytes of state besides that of the rows while mini-batches are noisy."""
    cost: Mapping[str, float]
    """SGD steps that a step costs, by part: its multiplications over those of a forward and a backward pass
    over the mini-batch and SGD's update."""
    engine: str
    """How Fisher products are computed: `"by hand"`, `"forward mode"` or `"finite differences"`."""
    examples: int
    """Examples of the mini-batch."""
    statistics_examples: int
    """Those that the statistics are estimated on."""
    fisher_examples: int
    """Those that the Fisher products are computed on."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained."""
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
            lines += ["Falls back:", *reasons]
        if self.chains:
            lines += ["Inverted together:", *(f"  {' → '.join(chain)}" for chain in self.chains)]
        breaks = [f"  before {row.name!r}: {row.unchained}" for row in self.rows if row.unchained]
        if breaks:
            lines += ["No chain:", *breaks]
        if self.frozen:
            more = f" and {len(self.frozen) - 6} more" if len(self.frozen) > 6 else ""
            lines.append(f"Frozen: {', '.join(self.frozen[:6])}{more}")
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.cost.items())
        noisy = f" (up to {readable(self.noise)} more while mini-batches are noisy)"
        lines += [
            f"Fisher products: {self.engine}, on {self.fisher_examples} of {self.examples} examples; "
            f"statistics on {self.statistics_examples}",
            f"A step costs {self.sgd_steps:.1f} SGD steps: {parts}",
            f"State: {readable(self.state)}" + (noisy if self.noise else ""),
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
            loss module and the model's outputs are usually enough. They are not used on the `meta` device,
            where models can be planned for that fit in no memory.
        **settings: those of `KFAC`.

    Raises:
        ExampleError: the model can't be called with the example, or the targets don't fit.
        UnsupportedModelError: `KFAC` would refuse the model.
    """
    optimizer = KFAC(model, loss, **settings)
    optimizer.close()
    network = optimizer.network
    weight_decay = max(group["weight_decay"] for group in optimizer.param_groups)
    with _untouched(network), full_precision(network.device) as callers:
        batch = record_example(model, network, example, targets, callers)
        return _plan(network, batch, optimizer.settings, weight_decay)


def _plan(network: Network, batch: Batch, settings: Settings, weight_decay: float) -> Plan:
    """The plan for mini-batches like this one."""
    batch = check_examples(network, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the plan says the same
        network = discover(network, batch.passes[0])
    found = count_passes(network, batch, settings)
    network = found.network
    shapes = [unit.shape for unit in network.units]
    chains = find_chains(network, batch.passes[0]) if settings.inverse.couples else None
    pieces = [piece for piece in chains.pieces if len(piece) > 1] if chains else []
    links = {pair[0]: pair[1] for piece in pieces for pair in pairwise(piece)}
    vectors = _vectors(settings)
    if settings.inverse.wants_factors(shapes, batch.examples, weight_decay) and weight_decay:
        vectors += 1  # η F̆⁻¹θ
    costs, numbers = [], []
    for n, (unit, seen) in enumerate(zip(network.units, found.units, strict=True)):
        moments, cost = sum(t.numel() for t in tensors_in(seen.moments)), seen.inverse
        if n in links:
            following = shapes[links[n]]
            cost = cost + settings.inverse.cost_between(unit.shape, following)
            moments += sum(a * b for a, b in zip(unit.shape, following, strict=True))
        costs.append(cost)
        numbers.append(moments + cost.numbers + vectors * unit.shape[0] * unit.shape[1])
    S1, S2 = _curvature_examples(network, batch, settings)
    tried = _candidates(settings, weight_decay)
    cost_by_part, cost_by_unit = _cost(settings, found, costs, (batch.examples, S1, S2), tried)
    rows = [
        Row(
            name=unit.name,
            parameters=unit.names,
            shape=unit.shape,
            block=unit.block.describe(*unit.shape),
            factors=_sizes(found.units[n].moments),
            state=unit.parameters[0].element_size() * numbers[n],
            cost=cost_by_unit[n],
            fallback=isinstance(unit.block, DiagonalBlock) or not unit.observed,
            why=_why(network, unit),
            unchained=chains.breaks.get(n, "") if chains else "",
        )
        for n, unit in enumerate(network.units)
    ]
    memory = settings.step_rule.long_memory
    noisy = 0 if memory is None else 1 + (memory.averaged is not None)
    trained = {id(p) for p in network.parameters}
    return Plan(
        model=type(network.model).__name__,
        rows=tuple(rows),
        noise=noisy * sum(p.numel() * p.element_size() for p in network.parameters),
        cost=cost_by_part,
        engine=found.engine,
        examples=batch.examples,
        statistics_examples=S1,
        fisher_examples=S2,
        frozen=tuple(n for n, p in network.model.named_parameters() if id(p) not in trained),
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


def _vectors(settings: Settings) -> int:
    """Vectors in parameter space that the state has: momentum, and those that undo a step."""
    validates = any(settings.damping.measures(k) == "next" for k in FIRST)
    undo = 2 if validates and settings.acceptance.rejection is not None else 0
    return 1 + undo


def _candidates(settings: Settings, weight_decay: float) -> int:
    """How many γ a refresh tries once λ has settled."""
    m = Measurement(lambda_=1.0, weight_decay=weight_decay)
    state = settings.gamma.init(m)
    return max(len(settings.gamma.candidates(state, replace(m, iteration=k))) for k in LATER)


def _curvature_examples(network: Network, batch: Batch, settings: Settings) -> tuple[int, int]:
    """How many examples S₁ and S₂ have."""
    shares = settings.intervals.shares(
        batch.examples, batch.most_terms, convolutional=network.convolutional
    )
    if batch.random and not batch.traced:
        shares = shares[1], shares[1]
    S1, S2 = subsets(network, batch, sizes(batch.examples, *shares), None)
    return S1.examples, S2.examples


# ---------------------------------------------------------------------------------------------- cost


@dataclass(frozen=True)
class _Unit:
    """One unit, by a few examples."""

    moments: Moments
    inverse: InverseCost
    uses: float
    """Multiplications of V with its inputs, per example."""
    statistics: float
    """Multiplications that make the moments, per example."""


@dataclass(frozen=True)
class Counts:
    """Multiplications of a step's passes, per example, with frozen layers in them."""

    network: Network
    """With diagonal blocks for units whose uses are not all seen."""
    units: Sequence[_Unit]
    gradient: float
    """A forward and a backward pass."""
    forward: float
    again: float
    """The forward pass of the statistics; none by hand, as `KFAC.closure` has kept that of the gradient."""
    backward: float
    """The backward pass of the statistics for one vector, without products for weights."""
    tangents: float
    """J v of the directions that the step is combined from."""
    outputs: int
    """Outputs of an example, over all loss calls."""
    engine: str


def _cost(
    settings: Settings, counts: Counts, costs: Sequence[InverseCost], m: Sequence[int], tried: int
) -> tuple[Mapping[str, float], list[float]]:
    """The cost of a step in SGD steps, by part, and that of every unit's statistics and inverse.

    Args:
        settings: of `KFAC`.
        counts: by `count_passes`.
        costs: of every unit's inverse.
        m: examples of the mini-batch, of S₁ and of S₂.
        tried: candidates for γ that a refresh tries.
    """
    size = sum(p.numel() for p in counts.network.parameters)
    sgd = m[0] * counts.gradient + size
    draws = counts.outputs if isinstance(settings.fisher, ExactFisher) else settings.fisher.draws
    ekfac = isinstance(settings.inverse, EigenvalueCorrectedInverse)
    # EKFAC transforms inputs and gradients to the eigenbasis, and multiplies them for every example.
    moments = [
        m[1] * draws * (unit.statistics + (unit.statistics + unit.uses) * ekfac)
        for unit in counts.units
    ]
    interval = settings.intervals.inverse_interval or LONGEST_INTERVAL
    made = 1 if ekfac else tried  # eigenvectors do not depend on γ
    inversions = [made * cost.inversion / interval for cost in costs]
    products = [(1 + (tried - 1) / interval) * cost.product for cost in costs]
    validations = sum(settings.damping.measures(k) is not None for k in LATER) / len(LATER)
    parts = {
        "gradient": sgd,
        "statistics": m[1] * (counts.again + draws * counts.backward) + sum(moments),
        "Fisher products": m[2] * counts.tangents,
        "refreshes": sum(inversions),
        "preconditioning": sum(products),
        "validation": validations * m[0] * counts.forward,
    }
    units = [sum(each) / sgd for each in zip(moments, inversions, products, strict=True)]
    return MappingProxyType({name: value / sgd for name, value in parts.items()}), units


class Multiplications(TorchDispatchMode):
    """Counts the multiplications of matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Products in place and attention on CPUs are in the registry under other names.
        name = func._overloadpacket.__name__.rstrip("_").replace("_for_cpu", "")
        counter: Callable[..., int] | None = flop_registry.get(getattr(torch.ops.aten, name, None))
        if counter is not None:
            self.count += counter(*args, **kwargs, out_val=result) / 2
        return result


def _counted(run: Callable[[], T]) -> tuple[T, float]:
    with Multiplications() as counted:
        result = run()
    return result, counted.count


@torch.no_grad()
def count_passes(network: Network, batch: Batch, settings: Settings) -> Counts:
    """Take the first few examples of a mini-batch through the passes of a step, and count them."""
    (some,) = subsets(network, batch, [min(FEW, batch.examples)], None)
    part = some.passes[0]  # micro-batches are alike
    view = Traced(network, part)
    outputs, again = _counted(lambda: view.outputs)
    vectors = [_random_like(z) for z in outputs]
    taps, backward = _counted(lambda: view.taps(vectors))
    if network.device.type != "meta":
        network = network.demoted(
            missing_uses(view, vectors, taps, torch.finfo(network.dtype).eps),
            "its gradient is not the one rebuilt from the uses that are seen",
        )
    units = [_count_unit(network, n, own, settings) for n, own in enumerate(taps)]
    _, forward = _counted(lambda: part.run(network.model))
    _, gradient = _counted(lambda: _gradient(network, part))
    engine, learned = _engine(network, part)
    copies = 1 + settings.step_rule.momentum
    vector = _direction(network)
    around = linearize(replace(network, learned=learned), part)
    _, tangents = _counted(lambda: around.jvp([vector] * copies))
    tangents *= (copies + settings.step_rule.cg_steps - 1) / copies
    if engine == BY_HAND:
        again = 0.0
        _, backward = _counted(lambda: around.taps(vectors))
    else:
        # Torch does not count all fused kernels, but each weight is multiplied at least once.
        size = sum(p.numel() for p in network.parameters)
        least = max(sum(unit.uses for unit in units), float(part.examples * size))
        unseen = max(least - forward, 0.0)
        forward, gradient = forward + unseen, gradient + 3 * unseen
        again, backward = max(again, least), max(backward, least)
        tangents = max(tangents, 2 * copies * least)
    n = max(part.examples, 1)
    return Counts(
        network=network,
        units=[replace(u, uses=u.uses / n, statistics=u.statistics / n) for u in units],
        gradient=gradient / n,
        forward=forward / n,
        again=again / n,
        backward=backward / n,
        tangents=tangents / n,
        outputs=round(sum(z.numel() for z in outputs) / n),
        engine=engine,
    )


@torch.enable_grad()
def _gradient(network: Network, part: Pass) -> None:
    """A forward and a backward pass, as for SGD."""
    outputs = [z for z in part.run(network.model) if z.requires_grad]
    torch.autograd.grad(
        outputs, network.parameters, [torch.ones_like(z) for z in outputs], allow_unused=True
    )


def _count_unit(network: Network, number: int, taps: Taps, settings: Settings) -> _Unit:
    unit = network.units[number]
    if not unit.observed:
        zeros = torch.zeros(unit.shape, dtype=unit.dtype, device=network.device)
        shown: Taps = SummedGradient(zeros)
    else:
        shown = taps or network.unused(number)
    moments, made = _counted(lambda: unit.block.observe(shown, 1.0))
    vectors = 0 if isinstance(shown, SummedGradient) else sum(map(_columns, shown))
    uses = float(unit.shape[0] * unit.shape[1] * vectors)
    return _Unit(moments, settings.inverse.cost(moments), uses, made)


def _columns(tap: AnyTap) -> int:
    """How many vectors V was multiplied with; for products of numbers one by one, none."""
    if isinstance(tap, Tap):
        return tap.grads.shape[0] * tap.grads.shape[1]
    return tap.grads.shape[1] * tap.grads.shape[2] if isinstance(tap, GroupedTap) else 0


def _sizes(moments: Moments) -> str:
    named = [(name, value) for name, value in vars(moments).items() if isinstance(value, Tensor)]
    return ", ".join(f"{name} {'×'.join(map(str, value.shape))}" for name, value in named)


def _engine(network: Network, part: Pass) -> tuple[str, Learned]:
    """How J v is computed, tried out as the first step will, and what that shows of the network."""
    learned = Learned(forward_mode=network.learned.forward_mode)
    if isinstance(linearize(network, part), ByHand):
        return BY_HAND, learned
    if network.device.type == "meta":  # without numbers there is nothing to compare
        return FORWARD_MODE, replace(learned, compared=True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        Traced(replace(network, learned=learned), part).jvp([_direction(network)])
    engine = FORWARD_MODE if learned.forward_mode else FINITE_DIFFERENCES
    if any(str(warning.message) == WRONG_TANGENTS for warning in warned):
        engine += ", which do not agree with the gradient"
    return engine, replace(learned, compared=True)


def _direction(network: Network) -> Matrices:
    """A direction of the size of θ, with every unit in it."""
    return tuple(
        _random_like(V) * (V.norm() / V.numel() ** 0.5).clamp(min=1e-3) for V in network.theta()
    )


def _random_like(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return drawn.to(tensor.device)


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
        callers: the context that the model is to be called in, see `model/precision.py`.

    Raises:
        ExampleError: the model can't be called so, or its outputs do not fit the loss.
    """
    args, kwargs = _arguments(example)
    if network.device.type == "meta":
        targets = None  # the values of the terms' weights would be read
    with record(model, network.objective, network.buffers) as recording, torch.enable_grad():
        with callers():
            try:
                outputs = model(*args, **kwargs)
            except Exception as error:
                raise ExampleError(
                    "kronfac.plan calls the model with the example, as training does: a tensor, a tuple of "
                    f"arguments or a dict of keyword arguments. {type(model).__name__} got "
                    f"{_described(example)} and raised {type(error).__name__}: {error}. Pass what you call "
                    "the model with."
                ) from error
            loss = _loss(network, outputs, targets, seen=bool(recording.losses))
        if loss is not None and loss.requires_grad:
            # For the gradients that arrive at the loss calls; none are left in the parameters.
            torch.autograd.grad(loss, network.parameters, allow_unused=True)
    try:
        return recording.batch()
    except KronfacError as error:
        raise ExampleError(
            "kronfac.plan needs an example whose outputs have gradients, and a loss that fits them; "
            f"{type(model).__name__} got {_described(example)}. {error} Pass what you call the model with, "
            "and targets."
        ) from error


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if type(example) is tuple else (example,)), {}


def _loss(network: Network, outputs: Any, targets: Any, *, seen: bool) -> Tensor | None:
    """The loss of the outputs; that of a model that computes it itself is the first single number."""
    if targets is None:
        single = (t for t in tensors_of(outputs) if t.numel() == 1 and t.requires_grad)
        return next(single, None) if seen else None
    try:
        return network.objective.loss(outputs, targets).sum()
    except Exception as error:
        raise ExampleError(
            f"kronfac.plan calls {type(network.objective.module).__name__} with the model's outputs and "
            f"the targets; it got {_described(outputs)} and {_described(targets)} and raised "
            f"{type(error).__name__}: {error}. Pass targets that fit, or none."
        ) from error


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(value))
    kind = type(value).__name__
    return f"a {kind} with tensors {shapes}" if shapes else f"a {kind}"
