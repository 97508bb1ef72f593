"""A training configuration as one flat JSON object, the way `config.json` of a run holds it."""

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from kronfac_experiments.config import (
    FirstOrderOptions,
    KfacOptions,
    Limits,
    Recording,
    TrainConfig,
)

GROUPS: dict[str, type] = {
    "limits": Limits,
    "kfac": KfacOptions,
    "first_order": FirstOrderOptions,
    "recording": Recording,
}
LATER = {"ddp": False}
"""Options that runs of earlier versions did not write down."""


def to_json(config: TrainConfig) -> dict[str, Any]:
    """One flat object; options that the optimizer does not have are null, folders left out.

    `problem` is the name of the data set also if that is a user's own.
    """
    flat: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if f.name in GROUPS:
            flat |= asdict(value)
        elif f.name not in ("run_dir", "resume"):
            flat[f.name] = str(value) if isinstance(value, Path) else value
    flat["problem"] = config.name
    if config.optimizer != "kfac":
        flat |= dict.fromkeys((f.name for f in fields(KfacOptions)), None)
    return flat


def from_json(flat: dict[str, Any]) -> TrainConfig:
    """The configuration that `to_json` wrote; raises ValueError for anything else."""
    flat = {**LATER, **flat}
    try:
        groups = {}
        for name, kind in GROUPS.items():
            values = {f.name: flat[f.name] for f in fields(kind)}
            groups[name] = (
                kind() if name == "kfac" and flat["optimizer"] != "kfac" else kind(**values)
            )
        groups["recording"] = replace(
            groups["recording"], evaluate_at=tuple(groups["recording"].evaluate_at)
        )
        own = [f.name for f in fields(TrainConfig) if f.name not in (*groups, "run_dir", "resume")]
        values = {name: flat[name] for name in own}
        if values["data"] is not None:
            values |= {"data": Path(values["data"]), "problem": None}
        return TrainConfig(**values, **groups)
    except (KeyError, TypeError) as error:
        raise ValueError(f"The configuration is not one of kronfac train: {error!r}.") from error
