"""The plan of several processes from that of one: pure arithmetic, with the equations of `world.py`."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from kronfac.assignment import assign, sums_by_rank
from kronfac.planning.plan import Memory, Plan, Work
from kronfac.planning.world import World, WorldPlan

CONTROL_MESSAGES, CONTROL_BYTES = 5, 1000
"""Messages of a step that ranks agree by, four and those of validations and refreshes; bytes of each at the
most."""


def plan_world(plan: Plan, world: World, examples: tuple[int, int, int] | None = None) -> WorldPlan:
    """The plan of several processes from that of one.

    Args:
        plan: of one process, made by `kronfac.plan`.
        world: with `flops` that are known.
        examples: of the mini-batch, of the statistics and of the Fisher products; None for the plan's.

    Raises:
        ValueError: the plan has nothing to compute it from, or `flops` are missing.
    """
    work = plan.work
    if work is None or world.flops is None:
        raise ValueError(
            "plan_world needs a plan that kronfac.plan has made, and a World with flops; got "
            f"work={work} and flops={world.flops}. Pass World(..., flops=1e13)."
        )
    whole = examples or (plan.examples, plan.statistics_examples, plan.fisher_examples)
    m, m1, m2 = (-(-count // world.processes) for count in whole)
    ranks = _assignment(plan, world.processes)
    loads = sums_by_rank([row.inversion for row in plan.rows], ranks, world.processes)
    groups = [world.group(rank) for rank in ranks]
    computation, refresh = _computation(plan, work, world, (m, m1, m2), loads, groups)
    sent, often = _bytes(plan, work, world, (m, m1, m2), groups)
    seconds = {kind: sent[kind] / world.bandwidth + often[kind] * world.latency for kind in sent}
    return WorldPlan(
        world=world,
        examples=whole,
        share=(m, m1, m2),
        computation=MappingProxyType(computation),
        communication=MappingProxyType(seconds),
        bytes=MappingProxyType(sent),
        memory=_memory(plan, work, world, (m, m1, m2), groups),
        assignment=ranks,
        balance=max(loads) * world.processes / sum(loads) if sum(loads) else 1.0,
        refresh=refresh + work.interval * seconds["inverses"],
    )


def _assignment(plan: Plan, processes: int) -> tuple[int, ...]:
    """The rank of every unit; those of a chain are inverted together."""
    chain = {name: n for n, names in enumerate(plan.chains) for name in names}
    pieces: dict[object, list[int]] = {}
    for number, row in enumerate(plan.rows):
        pieces.setdefault(chain.get(row.name, row.name), []).append(number)
    costs = [sum(plan.rows[n].inversion for n in piece) for piece in pieces.values()]
    ranks = [0] * len(plan.rows)
    for piece, rank in zip(pieces.values(), assign(costs, processes), strict=True):
        for n in piece:
            ranks[n] = rank
    return tuple(ranks)


def _computation(
    plan: Plan,
    work: Work,
    world: World,
    share: tuple[int, int, int],
    loads: Sequence[float],
    groups: Sequence[int],
) -> tuple[dict[str, float], float]:
    """Seconds by phase, and those of the inversions of one refresh."""
    m, m1, m2 = share
    products = sums_by_rank([row.product for row in plan.rows], groups, world.groups)
    shares = {
        "gradient": m / plan.examples,
        "statistics": m1 / plan.statistics_examples,
        "Fisher products": m2 / plan.fisher_examples,
        "refreshes": _fraction(loads),
        "preconditioning": _fraction(products),
        "validation": m / plan.examples,
    }
    assert world.flops is not None
    speed = dict.fromkeys(shares, world.flops / 2)
    speed["refreshes"] = (world.inversion_flops or world.flops) / 2
    seconds = {
        name: cost * work.gradient * shares[name] / speed[name] for name, cost in plan.cost.items()
    }
    return seconds, seconds.get("refreshes", 0.0) * work.interval


def _fraction(loads: Sequence[float]) -> float:
    """The largest share of all work that one has."""
    return max(loads) / sum(loads) if sum(loads) else 1.0


def _bytes(
    plan: Plan, work: Work, world: World, share: tuple[int, int, int], groups: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that a process sends in a step, by message, and messages one after another."""
    W, n = world.processes, world.groups
    ring = (W - 1) / W
    P = plan.memory.gradients
    S = sum(row.sent for row in plan.rows) + work.follows
    held = sums_by_rank([row.inverse_sent for row in plan.rows], groups, n)
    sizes = world.group_sizes()
    passed = [size * (g - 1) / g for size, g in zip(held, sizes, strict=True)]
    sent = {
        "gradient": 2 * P * ring,
        "statistics": 2 * S * ring,
        "inverses": work.inversions * max(passed) / work.interval,
        "directions": P * (n - 1) / n,
        "control": float(CONTROL_MESSAGES * CONTROL_BYTES * (W - 1)),
    }
    all_ranks = world.sequence(W)
    often = {
        "gradient": 2.0 * all_ranks,
        "statistics": 2.0 * all_ranks,
        "inverses": work.inversions * world.sequence(max(sizes)) / work.interval,
        "directions": float(world.sequence(n)),
        "control": float(CONTROL_MESSAGES * all_ranks),
    }
    lent = sum(row.lent for row in plan.rows)
    if lent:
        sent["bases"] = lent * (n - 1) / n
        often["bases"] = float(world.sequence(n))
    if world.wrapper == "fsdp":
        sent["gradient"] /= 2  # reduced and scattered, and not gathered again
        often["gradient"] /= 2
        passes = _gathers(work, world, share)
        sent["parameters"] = passes * plan.memory.parameters * ring
        often["parameters"] = float(passes * all_ranks)
    return sent, often


def _gathers(work: Work, world: World, share: tuple[int, int, int]) -> int:
    """How often a step gathers all parameters.

    Once forwards and once backwards for every micro-batch of the gradient and of the statistics, and for
    two displaced passes along each direction of the Fisher products.
    """
    parts = _parts(world, work, share)
    m, m1, m2 = (-(-count // part) for count, part in zip(share, parts, strict=True))
    return 2 * m + 2 * m1 + 2 * work.directions * m2


def _parts(world: World, work: Work, share: tuple[int, int, int]) -> tuple[int, int, int]:
    """Examples that go through each pass at once."""
    limit = work.parts or share
    m, m1, m2 = (
        min(count, most, world.micro_batch or count)
        for count, most in zip(share, limit, strict=True)
    )
    return m, m1, m2


def _memory(
    plan: Plan, work: Work, world: World, share: tuple[int, int, int], groups: Sequence[int]
) -> Memory:
    """Bytes of the process that holds most: the statistics of all units, the inverses of its group."""
    inverses = sums_by_rank([row.inverse for row in plan.rows], groups, world.groups)
    own = round(max(inverses))
    lent = [row.inverse if row.lent else 0 for row in plan.rows]
    borrowed = sum(lent) - round(
        sums_by_rank(lent, groups, world.groups)[inverses.index(max(inverses))]
    )
    moments, vectors = plan.memory.moments, plan.memory.gradients
    kept = plan.memory.state - moments - sum(row.inverse for row in plan.rows)
    m, m1, m2 = _parts(world, work, share)
    divided = world.processes if world.wrapper == "fsdp" else 1
    matrices = plan.memory.matrices
    if divided > 1:
        # Gradients of the units that a process has inverses of are gathered to be multiplied.
        sizes = [row.count * vectors / sum(r.count for r in plan.rows) for row in plan.rows]
        matrices = round(max(sums_by_rank(sizes, groups, world.groups)))
    return replace(
        plan.memory,
        parameters=-(-plan.memory.parameters // divided),
        gradients=-(-vectors // divided),
        matrices=matrices,
        state=moments + own - (-kept // divided),
        rollback=-(-plan.memory.rollback // divided),
        noise=-(-plan.memory.noise // divided),
        refresh=moments + work.candidates * (own - (-vectors // divided)),
        # Of EKFAC's inverse, all is there while statistics are taken.
        activations=max(work.activations.at(m1) - work.made, 0) + borrowed,
        # θ is displaced along a direction shard by shard.
        tangents=max(work.tangents.at(m2) - work.directions * (vectors + (-vectors // divided)), 0),
        # The gradients in its peak are divided, too.
        closure=max(work.closure.at(m) - vectors - (-vectors // divided), 0),
    )
