"""A plan: what becomes of every parameter, and what a step takes. Values and their text; no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from kronfac.planning.live_bytes import Peak

if TYPE_CHECKING:
    from kronfac.planning.world import WorldPlan


@dataclass(frozen=True)
class Row:
    """What becomes of the parameters of one unit."""

    name: str
    """The layer's path in the model, or the parameter's."""
    parameters: tuple[str, ...]
    """Full names of the parameters."""
    shape: tuple[int, int]
    """(rows, columns) of the matrix V that they form."""
    block: str
    """Its curvature block, as `"Kronecker (64, 33)"` or `"dense, 2 pieces"`."""
    factors: str
    """What is estimated, with its sizes, as `"A 33×33, G 64×64"`."""
    state: int
    """Bytes of what is kept of it from step to step."""
    refresh: int
    """Bytes that a refresh of the inverse takes besides, at the most."""
    fallback: bool = False
    """Whether it has a diagonal block, or its uses are not seen."""
    why: str = ""
    """Why it has no better block."""
    unchained: str = ""
    """Why no other unit precedes it in a chain, with the tridiagonal inverse."""
    moments: int = 0
    """Bytes of its statistics alone."""
    sent: int = 0
    """Bytes of its statistics as they are sent to other processes."""
    inverse: int = 0
    """Bytes of its inverse alone."""
    inverse_sent: int = 0
    """Bytes of its inverse as it is sent."""
    lent: int = 0
    """Bytes of its inverse as every process needs it in every step, if it follows the statistics."""
    inversion: float = 0.0
    """Multiplications that make its inverse."""
    product: float = 0.0
    """Multiplications of a product with its inverse."""

    @property
    def count(self) -> int:
        """The number of parameters."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Memory:
    """Bytes, by what they are for."""

    parameters: int
    """All of the model's, frozen ones included."""
    gradients: int
    """The parameters' own."""
    matrices: int
    """The gradient as matrices V, with biases in a column: copies, if a unit has several parameters."""
    state: int
    """Statistics, inverse, momentum, what it takes to roll back a step, and the average for `eval()`."""
    rollback: int
    """What it takes to roll back a step: gone once that is validated, before anything else is made."""
    noise: int
    """What a step has besides while mini-batches are noisy: δ beside the momentum buffer, in the state and
    for every γ that is tried, and θ̄."""
    moments: int
    """New statistics, beside those of the state."""
    refresh: int
    """What a step with a refresh has besides, at the most: new statistics, the inverses of two γ."""
    activations: int
    """What K-FAC's own pass over the examples of the statistics holds at its peak, an estimate."""
    tangents: int
    """What J v on the examples of the Fisher products holds at its peak, an estimate."""
    closure: int
    """What a forward and a backward pass over the mini-batch, or the largest of its micro-batches, holds at
    its peak, an estimate; the gradients are among it."""

    @property
    def phases(self) -> Mapping[str, int]:
        """All that is held at the peak of each phase of a step; one phase begins when another is over."""
        before = self.parameters + self.state + self.noise
        computing = before - self.rollback + self.gradients + self.matrices
        return MappingProxyType(
            {
                "closure": before + self.closure,
                "statistics": computing + self.moments + self.activations,
                "refresh": computing + self.refresh + self.tangents,
            }
        )

    @property
    def total(self) -> int:
        """The peak of a step: that of its largest phase."""
        return max(self.phases.values())


@dataclass(frozen=True)
class Work:
    """What a plan for several processes is computed from, beside rows, memory and cost."""

    gradient: float
    """Multiplications of one gradient of the mini-batch."""
    interval: int
    """Iterations from one refresh to the next."""
    inversions: int
    """Inverses of every unit that a refresh makes."""
    candidates: int
    """Inverses of every unit that a refresh has in memory at once."""
    directions: int
    """Directions of the Fisher products."""
    follows: int
    """Bytes of what an inverse follows in every step, such as EKFAC's second moments in the eigenbasis."""
    closure: Peak
    activations: Peak
    tangents: Peak
    """Memory of the passes, by the examples that go through at once."""
    made: int
    """Bytes of new statistics that the peak of their pass has in it."""
    parts: tuple[int, int, int] | None
    """Examples that go through the passes at once; None for all."""


@dataclass(frozen=True)
class Plan:
    """What K-FAC will do with a network; `str` makes a page of it."""

    model: str
    """The type of the model."""
    rows: tuple[Row, ...]
    """One for every unit, in the order of the units."""
    memory: Memory
    cost: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Multiplications of a step by part, in units of those of one gradient of the mini-batch."""
    engine: str = ""
    """How Fisher products are taken: `"by hand"`, `"forward mode"` or `"finite differences"`."""
    examples: int = 0
    """Examples of the mini-batch."""
    statistics_examples: int = 0
    """Those that the statistics are taken on."""
    fisher_examples: int = 0
    """Those that the Fisher products are taken on."""
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained."""
    chains: tuple[tuple[str, ...], ...] = ()
    """The units of every chain that the tridiagonal inverse inverts as a whole."""
    work: Work | None = None
    """What a plan for several processes is computed from."""
    world: "WorldPlan | None" = None
    """What each of several processes does, if the plan is for several."""

    @property
    def fallbacks(self) -> tuple[Row, ...]:
        """The units that have a diagonal block, or whose uses are not seen."""
        return tuple(row for row in self.rows if row.fallback)

    @property
    def gradients(self) -> float:
        """The cost of a step in gradients."""
        return sum(self.cost.values())

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
            lines.append(f"Frozen: {_listed(self.frozen)}")
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.cost.items())
        m = self.memory
        lines += [
            f"Fisher products: {self.engine}, on {self.fisher_examples} of {self.examples} examples; "
            f"statistics on {self.statistics_examples}",
            f"A step costs {self.gradients:.1f} gradients: {parts}",
            f"Memory: parameters {readable(m.parameters)}, gradients {readable(m.gradients)}, "
            f"state {readable(m.state)}"
            + (f" (up to {readable(m.noise)} more)" if m.noise else ""),
            f"        a refresh {readable(m.refresh)}; passes: closure about {readable(m.closure)}, "
            f"statistics {readable(m.activations)}, Fisher products {readable(m.tangents)}",
            f"        at the peak of a step about {readable(m.total)}",
        ]
        if self.world is not None:
            lines += ["", str(self.world)]
        return "\n".join(lines)


def _table(rows: tuple[Row, ...]) -> list[str]:
    heads = ("unit", "parameters", "block", "factors", "state", "refresh")
    cells = [
        (
            row.name,
            f"{row.count:,}",
            row.block,
            row.factors,
            readable(row.state),
            readable(row.refresh),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = []
    for line in (heads, *cells):
        aligned = [
            cell.rjust(width) if head in ("parameters", "state", "refresh") else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return lines


def _listed(names: tuple[str, ...], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def readable(count: int) -> str:
    """A number of bytes as people read it, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
