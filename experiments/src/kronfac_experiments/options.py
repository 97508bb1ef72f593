"""Options of commands: how they show in `--help`, how they are checked, and the command line with them."""

import shlex
from dataclasses import MISSING, fields
from typing import Any

import tyro


def hint(metavar: str, default: str) -> Any:
    """How an option that may be left open shows in `--help`."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def require(condition: bool, name: str, rule: str, value: object) -> None:
    """Check an option.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        words = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ValueError(f"--{name.replace('_', '-')} is {rule}; got {words}.")


def at_least(least: float, **options: Any) -> None:
    """Check options that are numbers or several of them; None is an option that is not given.

    Raises:
        ValueError: one is smaller, or one of several is missing.
    """
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, tuple) else (value,)
            enough = bool(values) and min(values) >= least
            require(enough, name, f"{least:g} or more", values or ("none",))


def command_line(name: str, config: Any, leave_out: tuple[str, ...] = ()) -> str:
    """The command with these options; those at their defaults are left out.

    Args:
        name: Words of the command after `kronfac`, with what has no option's name.
        config: Its options.
        leave_out: Options that are not said.
    """
    words = ["kronfac", *name.split()]
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name in leave_out or value == default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if not isinstance(value, bool):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)
