"""The plan of a network: discovered, surveyed on a few examples, and summed up."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from kronfac.control import Measurement
from kronfac.curvature import DiagonalBlock, EigenvalueCorrectedInverse, InverseCost, KroneckerBlock
from kronfac.network import Batch, Network, Unit
from kronfac.network.chain import Chains, find_chains
from kronfac.network.discovery import discover
from kronfac.network.division import arrange
from kronfac.network.learned import Learned
from kronfac.planning.cost import (
    curvature_examples,
    gradient_cost,
    interval,
    inversions,
    momentum_directions,
    step_cost,
)
from kronfac.planning.make_world import plan_world
from kronfac.planning.passes import PassMemory, pass_memory
from kronfac.planning.plan import Memory, Plan, Row, Work
from kronfac.planning.speed import measure_flops
from kronfac.planning.survey import FINITE_DIFFERENCES, Survey, survey
from kronfac.planning.world import World
from kronfac.settings import Settings

VALIDATED = range(2, 102)
"""Iterations over which it is looked up how often a rule wants something."""


def make_plan(
    network: Network,
    batch: Batch,
    settings: Settings,
    weight_decay: float,
    world: World | None = None,
) -> Plan:
    """The plan for mini-batches like this one; to be called inside of `untouched`."""
    # What is learned here is not what a step has learned.
    old = network.learned
    learned = Learned(dict(old.slicing), old.loaded, old.forward_mode)
    network = replace(network, learned=learned)
    batch = arrange(network, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the plan says the same
        network = discover(network, batch.passes[0])
    surveyed = survey(network, batch, settings.inverse)
    network = surveyed.network
    chains = find_chains(network, batch.passes[0]) if settings.inverse.couples else None
    between = {} if chains is None else _between(network, settings, chains)
    held, vectors = _candidates(settings, weight_decay), _vectors(settings)
    if weight_decay and settings.inverse.wants_factors(
        [unit.shape for unit in network.units], batch.examples, weight_decay
    ):
        vectors += 1  # η F̆⁻¹θ
    rows = tuple(
        _row(network, n, settings, surveyed, between, chains, vectors, held)
        for n in range(len(network.units))
    )
    S1, S2 = curvature_examples(settings, network, batch)
    network.learned.forward_mode = not surveyed.engine.startswith(FINITE_DIFFERENCES)
    passes = pass_memory(network, batch, settings.fisher, (S1, S2), momentum_directions(settings))
    trained = {id(p) for p in network.parameters}
    plan = Plan(
        model=type(network.model).__name__,
        rows=rows,
        memory=_memory(network, rows, settings, passes, surveyed, held),
        cost=step_cost(
            settings,
            surveyed,
            list(between.values()),
            (batch.examples, S1.examples, S2.examples),
            held > 1,
        ),
        engine=surveyed.engine,
        examples=batch.examples,
        statistics_examples=S1.examples,
        fisher_examples=S2.examples,
        frozen=tuple(n for n, p in network.model.named_parameters() if id(p) not in trained),
        chains=()
        if chains is None
        else tuple(
            tuple(network.units[n].name for n in piece) for piece in chains.pieces if len(piece) > 1
        ),
        work=_work(network, settings, batch, passes, surveyed, held),
    )
    if world is None:
        return plan
    if world.flops is None:
        products, inverses = measure_flops(network.device, network.dtype)
        world = replace(world, flops=products, inversion_flops=world.inversion_flops or inverses)
    examples = None
    if world.examples is not None:
        terms = batch.most_terms * world.examples // batch.examples
        shares = settings.shares(world.examples, terms, convolutional=network.convolutional)
        m1, m2 = (max(1, round(tau * world.examples)) for tau in shares)
        examples = world.examples, m1, m2
    return replace(plan, world=plan_world(plan, world, examples))


def _row(
    network: Network,
    number: int,
    settings: Settings,
    surveyed: Survey,
    between: Mapping[tuple[int, int], InverseCost],
    chains: Chains | None,
    vectors: int,
    held: int,
) -> Row:
    unit, seen = network.units[number], surveyed.units[number]
    moments, sent, cost = seen.moments, seen.packed, seen.inverse
    for (this, following), extra in between.items():
        if this == number:
            cost = cost + extra
            link = sum(
                a * b for a, b in zip(unit.shape, network.units[following].shape, strict=True)
            )
            moments, sent = moments + link, sent + link
    inverse = cost.numbers
    size = unit.shape[0] * unit.shape[1]
    itemsize = unit.parameters[0].element_size()
    return Row(
        name=unit.name,
        parameters=unit.names,
        shape=unit.shape,
        block=unit.block.describe(*unit.shape),
        factors=seen.factors,
        state=itemsize * (moments + inverse + vectors * size),
        # New statistics, the inverses, and for each a step in the memory of its direction.
        refresh=itemsize * (moments + held * (inverse + size)),
        fallback=isinstance(unit.block, DiagonalBlock) or not unit.observed,
        why=_why(network, unit),
        unchained="" if chains is None else chains.breaks.get(number, ""),
        moments=itemsize * moments,
        sent=itemsize * sent,
        inverse=itemsize * inverse,
        inverse_sent=itemsize * cost.sent,
        lent=itemsize * cost.sent if _follows(settings, unit) else 0,
        inversion=cost.inversion,
        product=cost.product,
    )


def _work(
    network: Network, settings: Settings, batch: Batch, passes: PassMemory, seen: Survey, held: int
) -> Work:
    follows = sum(
        unit.shape[0] * unit.shape[1] * unit.parameters[0].element_size()
        for unit in network.units
        if _follows(settings, unit)
    )
    return Work(
        gradient=gradient_cost(seen, batch.examples),
        interval=interval(settings),
        inversions=inversions(settings, held > 1),
        candidates=held,
        directions=momentum_directions(settings),
        follows=follows,
        closure=passes.closure,
        activations=passes.statistics,
        tangents=passes.tangents,
        made=_made(network, seen),
        parts=passes.parts if len(batch.passes) > 1 else None,
    )


def _follows(settings: Settings, unit: Unit) -> bool:
    """Whether the inverse of a unit takes in the statistics of every step."""
    ekfac = isinstance(settings.inverse, EigenvalueCorrectedInverse)
    return ekfac and isinstance(unit.block, KroneckerBlock)


def _made(network: Network, surveyed: Survey) -> int:
    """Bytes of the new statistics of a pass; those between neighbours in a chain are not made in it."""
    return sum(
        unit.parameters[0].element_size() * seen.moments
        for unit, seen in zip(network.units, surveyed.units, strict=True)
    )


def _why(network: Network, unit: Unit) -> str:
    """Why a unit has no better block."""
    if unit.why:
        return unit.why
    block, blocks = unit.block, network.blocks
    if isinstance(block, DiagonalBlock):
        return f"it is too large for dense blocks of {blocks.dense_limit} parameters"
    wide = max(unit.shape) > blocks.wide_limit
    if (
        isinstance(block, KroneckerBlock)
        and wide
        and (block.diagonal_grads or block.diagonal_inputs)
    ):
        return f"one side is wider than {blocks.wide_limit}, and has a diagonal factor"
    return ""


def _between(
    network: Network, settings: Settings, chains: Chains
) -> dict[tuple[int, int], InverseCost]:
    """For every two neighbours in a chain, what they take besides."""
    shapes = [unit.shape for unit in network.units]
    return {
        (a, b): settings.inverse.cost_between(shapes[a], shapes[b])
        for piece in chains.pieces
        for a, b in pairwise(piece)
    }


def _vectors(settings: Settings) -> int:
    """Vectors in parameter space that the state has: momentum, what rolls a step back, and θ̄."""
    return 1 + _rollback(settings) + (settings.average_decay is not None)


def _rollback(settings: Settings) -> int:
    """Vectors that roll a step back."""
    validates = any(settings.damping.measures(k) == "next" for k in VALIDATED)
    return 2 if validates and settings.acceptance.rejection is not None else 0


def _candidates(settings: Settings, weight_decay: float) -> int:
    """Inverses that a refresh has in memory at once."""
    state = settings.gamma.init(Measurement(lambda_=1.0, weight_decay=weight_decay))
    tried = [
        settings.gamma.candidates(
            state, Measurement(iteration=k, lambda_=1.0, weight_decay=weight_decay)
        )
        for k in VALIDATED
    ]
    most = max(map(len, tried))
    # In the background all of them are made; else the best so far stays, and one is made.
    return most if settings.inverse_lag else min(most, 2)


def _memory(
    network: Network,
    rows: Sequence[Row],
    settings: Settings,
    passes: PassMemory,
    surveyed: Survey,
    held: int,
) -> Memory:
    trained = _bytes(network.parameters)
    memory = settings.step_size.long_memory
    noisy = 0 if memory is None else 1 + (memory.averaged is not None) + held
    joined = [unit.parameters for unit in network.units if len(unit.parameters) > 1]
    m, m1, m2 = passes.parts
    return Memory(
        parameters=_bytes(network.model.parameters()),
        gradients=trained,
        matrices=sum(map(_bytes, joined)),
        state=sum(row.state for row in rows),
        rollback=_rollback(settings) * trained,
        noise=noisy * trained,
        moments=sum(row.moments for row in rows),
        refresh=sum(row.refresh for row in rows),
        activations=max(passes.statistics.at(m1) - _made(network, surveyed), 0),
        tangents=passes.tangents.at(m2),
        closure=passes.closure.at(m),
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
