"""States of version 6, in the form of today: what the rules remember lay flat beside each other there."""

import math
from typing import Any

from kronfac.errors import StateError

FIELDS = {
    "average", "average_start", "confirmed", "decayed", "factors", "gamma", "gamma_move", "generator",
    "inverse", "inverse_iteration", "inverse_lambda", "inverse_settings", "iteration",
    "judged_iteration", "lambda_", "last", "layers", "memory", "noise", "previous_delta", "refresh",
    "remembered",
}  # fmt: skip


def from_version_6(saved: dict[str, Any]) -> dict[str, Any]:
    """The same state as `state.load` reads it.

    Raises:
        StateError: something is missing.
    """
    if missing := FIELDS - saved.keys():
        raise StateError(f"The state is incomplete: it has no {sorted(missing)}.")
    delta, remembered, last = (saved[name] for name in ("previous_delta", "remembered", "last"))
    try:
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
    except (KeyError, TypeError) as error:
        raise StateError(f"The state of the last step is incomplete: {error}.") from error
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
