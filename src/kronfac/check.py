"""Is `p.grad` the gradient of what was recorded?

On the first mini-batch and every 100 iterations, the gradient is compared with two that K-FAC computes from
the record: the gradient of the loss calls by autograd, and Σ g āᵀ, rebuilt from the recorded uses of the
parameters. If the first differs by a factor, the recorded losses get the factor; if it differs in
direction, part of the loss was not recorded. If only the second differs, some uses of a parameter were not
recorded, and its unit gets a diagonal block.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient, Taps
from kronfac.errors import LoopError
from kronfac.groups import PerParameter
from kronfac.linearize import Traced
from kronfac.model import Unit, dot, hooked
from kronfac.record import Pass
from kronfac.record.recorder import zeroed
from kronfac.step.evaluation import Evaluation
from kronfac.step.state import CheckState

SAME_SCALE = 1e-4
"""Relative difference up to which two factors are the same; those of clipped steps are not that close."""
TOLERANCE, MIXED_TOLERANCE = 10.0, 0.2
"""Relative difference of two gradients that agree: in roots of the dtype's precision (5e-3 in float32, 2e-7
in float64); as it is if the closure ran in half precision."""
ROUNDING = 64
"""Additional difference, in the dtype's precision times Σ ‖g‖ ‖ā‖: near a minimum little is left of it."""
NOT_ZEROED_WARNING = (
    "loss.backward() has added to the gradients that the last KFAC.step() used: this step uses the sum, "
    "but the curvature of the last mini-batch alone. Call optimizer.zero_grad() before each backward(), or "
    "once before several micro-batches."
)


@dataclass(frozen=True)
class Findings:
    """The result of a check."""

    evaluation: Evaluation
    """As the step may take it: diagonal blocks where uses are missing, losses scaled like the gradient."""
    warnings: dict[str, str] = field(default_factory=dict)
    """Messages by kind; each kind is to be shown once."""


def check(
    evaluation: Evaluation,
    state: CheckState,
    left_out: Collection[int],
    *,
    due: bool,
    unscaled: bool,
) -> tuple[Findings, CheckState]:
    """Check an evaluation, and return what to remember for the next check.

    Args:
        evaluation: what was recorded, and the gradient.
        state: what earlier checks found.
        left_out: ids of trainable parameters that are in no parameter group.
        due: whether to compare the gradient, and not only to look for parameters without one.
        unscaled: whether a GradScaler has unscaled the gradient, which then has no factor to remember.
    """
    warnings = _untrained(evaluation, left_out)
    if evaluation.recorded_loss is None:
        return Findings(evaluation, warnings), state
    found = _compare(evaluation) if due else _Comparison(state.scale)
    if not due or found is None or unscaled:
        return Findings(evaluation.scaled(found.scale if found else 1.0), warnings), state
    state, where = replace(state, compared=True, scale=1.0), _where(evaluation)
    if found.others:
        closure = "Give step() a closure, in which every loss is seen, or declare"
        warnings["others"] = (
            f"The gradient of {_list(found.others)} is not that of the losses that KFAC sees the {where} "
            "call, whose curvature it uses: a penalty or another loss is in it, or derivatives by "
            f"torch.autograd.grad. {closure if where == 'loop' else 'Declare'} the rest with "
            "kronfac.observe. Weight decay is KFAC(weight_decay=…). Derivatives of the outputs are seen if "
            "kronfac.physics.WithDerivatives takes them."
        )
        return Findings(evaluation, warnings), state
    if found.unseen:
        names = _list(found.unseen)
        warnings[f"uses {names}"] = (
            f"KFAC does not see all uses of {names}: the gradient rebuilt from those it sees is not the "
            f"{where}'s. It gets a diagonal curvature block. Call the module instead of using its "
            "weight, or tell kronfac.register how the parameters are used."
        )
        network = evaluation.network
        units = [n for n, u in enumerate(network.units) if set(u.names) & set(found.unseen)]
        evaluation = replace(evaluation, network=network.demoted(units))
    evaluation, state = _with_factor(evaluation, found.scale, state, warnings)
    return Findings(evaluation, warnings), state


def _untrained(evaluation: Evaluation, left_out: Collection[int]) -> dict[str, str]:
    """Warnings of parameters without a gradient, and of a loss that was not recorded."""
    network, warnings = evaluation.network, dict[str, str]()
    known = {id(p) for p in network.parameters} | set(left_out)
    new = [n for n, p in network.model.named_parameters() if p.requires_grad and id(p) not in known]
    if new:
        warnings["parameters"] = (
            f"{_list(new)} became trainable after this KFAC was made, which does not train them. Call "
            "optimizer.add_param_group with them."
        )
    if len(evaluation.without_gradient) == len(network.units):
        return warnings  # which will be an error
    if idle := evaluation.names_without_gradient():
        warnings["gradients"] = (
            f"The {_where(evaluation)} left no gradient in {_list(idle)}; KFAC takes it as zero, which is "
            "right for layers that only some mini-batches use. Freeze what the loss never depends on, with "
            "requires_grad_(False) before KFAC is made."
        )
    if evaluation.batch.outside:
        shapes = ", ".join(str(tuple(shape)) for shape in evaluation.batch.outside)
        warnings["outside"] = (
            f"The loss depends on tensors outside the model that require a gradient, of shapes {shapes}: "
            "KFAC trains the model's parameters and not these. Register them as nn.Parameter of the model, "
            "or give them to an optimizer of their own."
        )
    if evaluation.batch.assumed:
        given = type(network.objective.module).__name__
        warnings["assumed loss"] = (
            "KFAC.step() has not seen a loss in the closure, so its curvature is that of the "
            f"{given} that KFAC was given, which may be far off. In place of a loss by hand, such as "
            "(r**2).mean(), call kronfac.least_squares(r), a loss of torch.nn, or "
            "kronfac.GaussNewton(loss) if it is convex in the outputs; or declare what the outputs predict "
            "with kronfac.observe. In place of torch.autograd.grad, take derivatives with "
            "kronfac.physics.WithDerivatives."
        )
    return warnings


def _with_factor(
    evaluation: Evaluation, scale: float, state: CheckState, warnings: dict[str, str]
) -> tuple[Evaluation, CheckState]:
    """The evaluation for a gradient that is `scale` times that of the recorded losses.

    The same factor in two comparisons belongs to the loss. Two different ones come from clipping: the
    curvature stays that of the loss.
    """
    if not math.isfinite(float(evaluation.returned_loss)):
        return evaluation, state  # the step is refused
    _, before = state.scales
    if before is not None and math.isclose(scale, before, rel_tol=SAME_SCALE):
        scale = before  # to the bit, so that a resumed run goes on as the first one would
    state = replace(state, scales=(before, scale))
    if before not in (None, scale):
        return replace(evaluation, clipped=scale), state
    if scale != 1:
        if before is not None:
            warnings["scale"] = (
                f"The {_where(evaluation)}'s gradient is {scale:.4g} times that of the losses it called, "
                "in every step; KFAC trusts the gradient. Scale the loss before backward(), "
                "not the gradient after it."
            )
        state, evaluation = replace(state, scale=scale), evaluation.scaled(scale)
    assert evaluation.recorded_loss is not None
    returned, seen = float(evaluation.returned_loss), float(evaluation.recorded_loss)
    if (scale == 1 or before is not None) and not _agree(evaluation, returned, seen):
        warnings["returned"] = (
            f"The closure returned a loss of {returned:.4g}, but its gradient is that of {seen:.4g}, "
            f"{seen / returned:.4g} times as much. KFAC trusts the gradient. Return what "
            "backward() is called on, summed over all micro-batches."
        )
    return evaluation, state


def _agree(evaluation: Evaluation, returned: float, seen: float) -> bool:
    """Whether two losses agree; in half precision, to few digits."""
    close = evaluation.batch.mixed and abs(returned - seen) <= MIXED_TOLERANCE * abs(seen)
    return close or evaluation.agrees(returned, seen)


def _where(evaluation: Evaluation) -> str:
    return "loop" if evaluation.reevaluate is None else "closure"


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


# ------------------------------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class _Comparison:
    scale: float = 1.0
    """The factor by which the gradient is larger than that of the recorded losses."""
    others: tuple[str, ...] = ()
    """Parameters whose gradient differs in direction."""
    unseen: tuple[str, ...] = ()
    """Parameters with uses that were not recorded."""


@dataclass
class _Recorded:
    """The gradient of one unit, from the record."""

    unit: Unit
    gradient: Tensor
    """Of the loss calls, by autograd."""
    rebuilt: Tensor | None = None
    """Σ g āᵀ over its uses; None if they are not known."""
    size: float = 0.0
    """Σ ‖g‖ ‖ā‖."""

    def differing(self, V: Tensor, W: Tensor, tolerance: float, per_size: float) -> list[str]:
        """The names of the parameters in which two gradients are not the same."""
        parts = zip(self.unit.names, self.unit.split(V), self.unit.split(W), strict=True)
        return [
            name
            for name, v, w in parts
            if not _norm(v - w) <= tolerance * _norm(v) + per_size * self.size
        ]


def _compare(evaluation: Evaluation) -> _Comparison | None:
    """Compare the gradient, without weight decay, with those of the record.

    Units with hooks on parameters are left out: hooks change gradients on purpose. None if nothing can be
    compared: all units have hooks, or numbers are not finite.

    Raises:
        LoopError: the gradient is zero, and that of the record is not.
    """
    network, mixed = evaluation.network, evaluation.batch.mixed
    free = [n for n, unit in enumerate(network.units) if not hooked(unit.parameters)]
    losses = float(evaluation.returned_loss), float(evaluation.loss)
    if not free or (mixed and not _agree(evaluation, *losses)):
        return None
    given = replace(evaluation, weight_decay=PerParameter(0.0)).gradient
    recorded, half = _gradients_of(evaluation)
    own, recorded = tuple(given[n] for n in free), [recorded[n] for n in free]
    seen = tuple(part.gradient for part in recorded)
    product, square, length = (
        float(dot(*pair)) for pair in ((seen, own), (seen, seen), (own, own))
    )
    if not all(map(math.isfinite, (product, square, *(r.size for r in recorded)))) or not square:
        return None
    precision = torch.finfo(network.dtype).eps
    tolerance, rounding = TOLERANCE * precision**0.5, ROUNDING * precision
    scale = product / square
    # The closure's gradient may be in half precision; what K-FAC computes itself is not.
    allowed, per_size = (MIXED_TOLERANCE, MIXED_TOLERANCE) if mixed else (tolerance, rounding)
    noise = per_size * sum(part.size for part in recorded)
    if not length and square**0.5 > noise:
        raise LoopError(zeroed("KFAC"))
    rest = tuple(g - scale * s for g, s in zip(own, seen, strict=True))
    if not float(dot(rest, rest)) ** 0.5 <= allowed * length**0.5 + noise:
        pairs = zip(recorded, own, strict=True)
        others = [n for r, V in pairs for n in r.differing(V, r.gradient, allowed, per_size)]
        return _Comparison(others=tuple(others))
    if scale <= 0 or abs(scale - 1) <= allowed + noise / square**0.5:
        scale = 1.0
    allowed = MIXED_TOLERANCE if half else tolerance
    known = [(r, r.gradient, r.rebuilt) for r in recorded if r.rebuilt is not None]
    unseen = [name for r, V, W in known for name in r.differing(V, W, allowed, rounding)]
    return _Comparison(scale, unseen=tuple(unseen))


def _gradients_of(evaluation: Evaluation) -> tuple[list[_Recorded], bool]:
    """The gradients of all units by the record, over all ranks, and whether uses are in half precision."""
    network, half = evaluation.network, False
    recorded = [
        _Recorded(u, torch.zeros(u.shape, dtype=u.dtype, device=network.device))
        for u in network.units
    ]
    for number, part in enumerate(evaluation.batch.passes):
        view = Traced(network, part)
        slopes = _slopes(view, part)
        gradients, half_here = view.vjp(slopes), view.half_precision
        half = half or half_here
        for unit, V, taps in zip(recorded, gradients, view.taps(slopes), strict=True):
            unit.gradient.add_(V)
            rebuilt, size = _rebuilt(taps, V)
            first = number == 0 or rebuilt is None or unit.rebuilt is None
            unit.rebuilt = rebuilt if first else unit.rebuilt + rebuilt  # type: ignore[operator]
            unit.size += size
    matrices = [V for unit in recorded for V in (unit.gradient, unit.rebuilt) if V is not None]
    numbers = [*(unit.size for unit in recorded), float(half)]
    *sizes, half_somewhere = evaluation.world.sum(matrices, "comparison", numbers=numbers)
    for unit, size in zip(recorded, sizes, strict=True):
        unit.size = size
    return recorded, bool(half_somewhere)


def missing_uses(
    view: Traced, vectors: Sequence[Tensor], taps: Sequence[Taps], precision: float
) -> list[int]:
    """The numbers of the units whose Jᵀ r is not the one rebuilt from their taps."""
    units = []
    for n, (V, own) in enumerate(zip(view.vjp(vectors), taps, strict=True)):
        rebuilt, size = _rebuilt(own, V)
        allowed = TOLERANCE * precision**0.5 * _norm(V) + ROUNDING * precision * size
        if rebuilt is not None and _norm(V - rebuilt) > allowed:
            units.append(n)
    return units


def _norm(V: Tensor) -> float:
    return float(V.double().norm())


def _rebuilt(taps: Taps, like: Tensor) -> tuple[Tensor | None, float]:
    """Σ g āᵀ of a unit, None if its uses are not known, and Σ ‖g‖ ‖ā‖."""
    if isinstance(taps, SummedGradient):
        return None, 0.0
    total = sum((tap.total() for tap in taps), torch.zeros_like(like))
    return total, sum(tap.magnitude() for tap in taps)


def _slopes(view: Traced, part: Pass) -> list[Tensor]:
    """∂h/∂z of every loss call, (terms, event)."""
    slopes = []
    for loss, z in zip(part.losses, view.raw_outputs(), strict=True):
        leaf = z.detach().requires_grad_()
        with torch.enable_grad():
            value = loss.evaluate(leaf)
        (slope,) = torch.autograd.grad(value, leaf)
        slopes.append(loss.terms.matrix(slope))
    return slopes
