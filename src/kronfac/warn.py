"""Warnings that point at the user's own line, however deep in the library they are given."""

import sys
import warnings

OWN = (
    "kronfac", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate",
    "transformers", "skorch", "timm", "deepxde",
)  # fmt: skip
"""Packages whose frames lie between the user's line and the warning."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the innermost line that is not of the library, of torch or of a framework that calls it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package(frame.f_globals) in OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_once(shown: set[str], kind: str, message: str) -> None:
    """Warn, unless a warning of this kind has been shown."""
    if kind not in shown:
        shown.add(kind)
        warn(message)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
