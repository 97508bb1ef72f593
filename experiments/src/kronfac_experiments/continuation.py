"""Whether a command begins a run or continues one, and that it is the same run then."""

from dataclasses import fields, replace
from typing import Any

from kronfac_experiments import ranks, run_directory
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.run_directory import RunError

CHANGEABLE = {"limits.iterations", "limits.seconds", "limits.until_error"}
CHANGEABLE |= {"recording.checkpoint_every", "resume"}
"""What a resumed run may have different: nothing that the trajectory depends on."""


def checked(config: TrainConfig) -> TrainConfig:
    """What is to be run, or continued, in a folder that is fit for it."""
    path = config.folder
    if config.resume is None and ranks.restarted() and run_directory.has_begun(path):
        return _begun(config, run_directory.read_config(path))
    if config.resume is None:
        run_directory.check_new(path)
    else:
        _check_unchanged(config, run_directory.read_config(path))
    return config


def _begun(config: TrainConfig, saved: TrainConfig) -> TrainConfig:
    """The run that this command has begun, before `torchrun` lost a worker and started it again.

    Raises:
        RunError: what is in the folder is another run.
    """
    # A saved configuration has no folder: it is in it.
    given = _flat(replace(config, optimizer=config.optimizer.lower(), run_dir=None))
    was = _flat(saved)
    if any(given[name] not in (None, was[name]) for name in given):
        run_directory.check_new(config.folder)
    return replace(saved, resume=config.folder)


def _check_unchanged(config: TrainConfig, saved: TrainConfig) -> None:
    given, was = _flat(config), _flat(saved)
    changed = [name for name in given if given[name] != was[name] and name not in CHANGEABLE]
    if changed:
        differences = ", ".join(
            f"--{name.split('.')[-1].replace('_', '-')} {given[name]} (was {was[name]})"
            for name in changed
        )
        raise RunError(
            f"A resumed run goes on as it began; only its limits and --checkpoint-every may "
            f"change. {config.folder} can't be continued with {differences}."
        )


def _flat(config: object, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        nested = hasattr(value, "__dataclass_fields__")
        flat |= _flat(value, f"{f.name}.") if nested else {prefix + f.name: value}
    return flat
