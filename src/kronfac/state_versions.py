"""States of earlier versions, in the form of today.

In version 6 what the rules remember lay flat beside each other; up to version 7 all units were linear
layers, whose factors were listed by kind; up to version 8 what passes have shown of the network and
comparisons of gradients was found anew by a resumed run; up to version 9 there was no average of the
iterates.
"""

import math
from typing import Any

from kronfac.curvature import ApproximateInverse, BlockDiagonalInverse, BlockTridiagonalInverse
from kronfac.curvature.damping import ExactTikhonov
from kronfac.errors import StateError
from kronfac.storage import CLASS

FIELDS = {
    "average", "average_start", "confirmed", "decayed", "factors", "gamma", "gamma_move", "generator",
    "inverse", "inverse_iteration", "inverse_lambda", "inverse_settings", "iteration",
    "judged_iteration", "lambda_", "last", "layers", "memory", "noise", "previous_delta", "refresh",
    "remembered",
}  # fmt: skip


def upgrade(saved: Any, version: Any, inverse: ApproximateInverse, current: int) -> dict[str, Any]:
    """The state as `state.load` reads it.

    Raises:
        StateError: it is of a version that is not known, or something is missing.
    """
    if version not in (6, 7, 8, 9):
        raise StateError(
            f"This kronfac reads states of the versions 6 to {current}; got {version!r}."
        )
    try:
        if version == 6:
            saved = _from_version_6(saved)
        if version < 8:
            saved = _from_version_7(saved, inverse)
        if version < 9:
            saved = {**saved, "learned": None, "gradients": None}
        return {**saved, "version": 10, "average": None}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"The state of version {version} is incomplete: {error}.") from error


def _from_version_7(saved: dict[str, Any], inverse: ApproximateInverse) -> dict[str, Any]:
    """Factors, inverses and what rules remember with the names of their classes."""
    factors, current, refresh = (saved[name] for name in ("factors", "current", "refresh"))
    gamma = saved["gamma"]
    return {
        **{name: value for name, value in saved.items() if name not in ("layers", "factors")},
        "version": 8,
        "units": saved["layers"],
        "damping": {CLASS: "DampingState", **saved["damping"]},
        "gamma": gamma and _gamma(gamma),
        "step": {CLASS: "StepState", **saved["step"]},
        "acceptance": {CLASS: "AcceptanceState", **saved["acceptance"]},
        "curvature": factors and _curvature(factors),
        "current": current and current | {"inverse": _inverse(current["inverse"], inverse)},
        "refresh": refresh
        and refresh
        | {
            "inverses": [
                item if isinstance(item, str) else _inverse(item, inverse)
                for item in refresh["inverses"]
            ]
        },
    }


def _gamma(packed: dict[str, Any]) -> dict[str, Any]:
    """What a rule for γ remembers; AdaptiveGamma alone has a move, and did not know the curvature then."""
    if "move" in packed:
        return {CLASS: "AdaptiveGammaState", "curvature": None, **packed}
    return {CLASS: "GammaState", **packed}


def _curvature(factors: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(factors["A"], factors["G"], strict=True)
    links = zip(factors["A_next"], factors["G_next"], strict=True)
    return {
        CLASS: "Curvature",
        "blocks": [{CLASS: "KroneckerMoments", "A": A, "G": G} for A, G in pairs],
        "links": [{CLASS: "Link", "A_next": A, "G_next": G} for A, G in links],
        "examples": factors["cases"],
    }


def _inverse(packed: dict[str, Any], inverse: ApproximateInverse) -> dict[str, Any]:
    if isinstance(inverse, BlockDiagonalInverse):
        exact = isinstance(inverse.tikhonov, ExactTikhonov)
        kind = "EigenKroneckerSum" if exact else "KroneckerProduct"
        pieces = [{CLASS: kind, **fields} for fields in packed["blocks"]]
        return {CLASS: "DampedInverse", "pieces": pieces}
    if not isinstance(inverse, BlockTridiagonalInverse):
        raise StateError(f"No earlier version could save {inverse!r}.")
    kind = "KroneckerDifferenceInverse"
    if inverse.solver == "smith":
        kind = "SmithDifferenceInverse"
    *conditional, last = packed["Sigma_inv"]
    last = {CLASS: "KroneckerProduct", **last}
    if not conditional:
        return {CLASS: "DampedInverse", "pieces": [last]}
    chain = {
        CLASS: "DampedChain",
        **packed,
        "Sigma_inv": [*({CLASS: kind, **fields} for fields in conditional), last],
    }
    return {CLASS: "DampedInverse", "pieces": [chain]}


def _from_version_6(saved: dict[str, Any]) -> dict[str, Any]:
    """The same state in version 7.

    Raises:
        StateError: something is missing.
    """
    if missing := FIELDS - saved.keys():
        raise StateError(f"The state is incomplete: it has no {sorted(missing)}.")
    delta, remembered, last = (saved[name] for name in ("previous_delta", "remembered", "last"))
    pending = last and {
        "delta": delta,
        "examples": last["cases"],
        "loss": last["loss"],
        "penalty": last["penalty"],
        "predicted_change": last["predicted_change"],
        "curvature_share": last["curvature_share"],
        "kept": last["kept"],
        # θ was kept for a validation by every rule that makes any, and noise tells of those.
        "validate": last["kept"] is not None and saved["noise"] is not None,
    }
    gamma = {"gamma": saved["gamma"], "move": saved["gamma_move"] or 1.0}
    current = saved["inverse"] and {
        "inverse": saved["inverse"],
        "iteration": saved["inverse_iteration"],
        "lambda_": saved["inverse_lambda"],
        "decayed": saved["decayed"],
    }
    memory = {
        "length": saved["memory"],
        "average": saved["average"],
        "start": saved["average_start"],
    }
    return {
        "version": 7,
        **{name: saved[name] for name in ("layers", "inverse_settings", "iteration", "generator")},
        "damping": {"lambda_": saved["lambda_"]},
        "gamma": None if math.isnan(saved["gamma"]) else gamma,
        "step": {"momentum": delta if remembered is None else remembered, "memory": memory},
        "acceptance": {
            "pending": pending,
            "validated": saved["judged_iteration"],
            "confirmed": saved["confirmed"],
            "noise": saved["noise"],
        },
        "factors": saved["factors"],
        "current": current,
        "refresh": saved["refresh"],
    }
