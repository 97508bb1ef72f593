"""What breaks as processes are added: computed from plans for growing numbers of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kronfac.planning.plan import readable
from kronfac.planning.world import WorldPlan

HALF = 0.5
"""Efficiency below which more processes are mostly wasted."""


@dataclass(frozen=True)
class Limit:
    """Something that more processes do not help against, or bring about."""

    processes: int
    """From how many on, of the numbers that were planned."""
    text: str


def limits(plans: Sequence[WorldPlan]) -> tuple[Limit, ...]:
    """What breaks, the fewest processes first; plans of the same settings, with growing processes."""
    found = [limit for find in _FINDERS if (limit := find(plans)) is not None]
    return tuple(sorted(found, key=lambda limit: limit.processes))


def breaks_first(plans: Sequence[WorldPlan]) -> str:
    """One sentence: what breaks first."""
    found = limits(plans)
    if not found:
        return f"Nothing breaks up to {_counted(plans[-1].world.processes)}."
    return f"First at {_counted(found[0].processes)}: {found[0].text}"


def _counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes:,} processes"


def _memory(plans: Sequence[WorldPlan]) -> Limit | None:
    over = [plan for plan in plans if not plan.fits]
    if not over:
        return None
    first = over[0]
    fitting = [plan.world.processes for plan in plans if plan.fits]
    least = min(over, key=lambda plan: plan.memory.total)
    after = [count for count in fitting if count > over[-1].world.processes]
    # At the end it is what no number of processes helps against.
    what = _held(least if not after else first)
    if after:
        rest = f"from {_counted(after[0])} on it fits"
    elif least is first:
        rest = "more processes do not change that"
    else:
        still = readable(least.memory.total)
        rest = f"at {_counted(least.world.processes)} it still holds {still}"
    return Limit(
        first.world.processes,
        f"memory: a process would hold {readable(first.memory.total)} of its "
        f"{readable(round(first.world.memory or 0))}; {rest}. Most of it is {what}.",
    )


def _held(plan: WorldPlan) -> str:
    """What most of the peak is for, in words."""
    m = plan.memory
    phase = max(m.phases, key=lambda name: m.phases[name])
    vectors = m.gradients + m.parameters + m.noise
    parts = {"parameters, gradients and vectors of their size": vectors}
    if phase == "closure":
        parts |= {"the state": m.state, "the activations of the closure": m.closure}
    elif phase == "statistics":
        parts |= {
            "the state": m.state - m.rollback,
            "new statistics": m.moments,
            "the activations of the statistics": m.activations,
        }
    else:
        parts |= {
            "the state": m.state - m.rollback,
            "new statistics and inverses at a refresh": m.refresh,
            "the tangents": m.tangents,
        }
    name = max(parts, key=lambda part: parts[part])
    return f"{name}, {readable(parts[name])}"


def _communication(plans: Sequence[WorldPlan]) -> Limit | None:
    for plan in plans:
        sending, computing = sum(plan.communication.values()), sum(plan.computation.values())
        if sending > computing:
            kind = max(plan.communication, key=lambda name: plan.communication[name])
            return Limit(
                plan.world.processes,
                f"communication: sending takes {sending:.3g} s of a step, computing {computing:.3g} s. "
                f"Most of it is {kind}, {readable(round(plan.bytes[kind]))}.",
            )
    return None


def _examples(plans: Sequence[WorldPlan]) -> Limit | None:
    for plan in plans:
        few = [
            f"{count:,} of {what}"
            for count, what in zip(
                plan.examples,
                ("the mini-batch", "the statistics", "the Fisher products"),
                strict=True,
            )
            if count < plan.world.processes
        ]
        if few:
            return Limit(
                plan.world.processes,
                f"examples: there are fewer than processes, {', '.join(few)}; some processes have none.",
            )
    return None


def _refresh(plans: Sequence[WorldPlan]) -> Limit | None:
    for plan in plans:
        working = len(set(plan.assignment))
        if working < plan.world.processes:
            return Limit(
                plan.world.processes,
                f"refreshes: {working:,} processes have work in them, the others wait for them; "
                f"a refresh takes {plan.refresh:.3g} s.",
            )
    return None


def _efficiency(plans: Sequence[WorldPlan]) -> Limit | None:
    first = plans[0]
    for plan in plans:
        speedup = first.seconds / plan.seconds
        share = speedup * first.world.processes / plan.world.processes
        if share < HALF:
            return Limit(
                plan.world.processes,
                f"efficiency: a step is {speedup:.3g} times as fast as with {first.world.processes:,}, "
                f"{100 * share:.0f} % of what the processes could; most of a step is {plan.dominates}.",
            )
    return None


_FINDERS = (_memory, _communication, _examples, _refresh, _efficiency)
