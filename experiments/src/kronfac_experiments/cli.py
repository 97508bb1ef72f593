"""The console script `kronfac`: which command, its options, and one clear line for a mistake.

Exit codes: 0; 1 when something failed while running; 2 for a mistake in what was asked for; 130 and 143
after Ctrl-C and SIGTERM. With `KRONFAC_DEBUG=1` errors come with their traceback.
"""

import importlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kronfac import KronfacError

DEBUG_VARIABLE = "KRONFAC_DEBUG"


@dataclass(frozen=True)
class Command:
    """A subcommand by name, so that only the one that is called gets imported.

    Args:
        config: The dataclass of its options, with its module below `kronfac_experiments`.
        summary: For `kronfac --help`.
        run: Function beside it that takes the options and may return the files it wrote.
        defaults: Takes the options, and may return others that those not given are taken from.
    """

    config: str
    summary: str
    run: str
    defaults: str | None = None


@dataclass(frozen=True)
class Group:
    """A command that has commands of its own.

    Args:
        summary: For the help of what it belongs to.
        commands: By name.
    """

    summary: str
    commands: "dict[str, Command | Group]"


BENCHMARKS: dict[str, Command | Group] = {
    "step": Command(
        "bench.steps.StepConfig", "a step of K-FAC over one of SGD, by part", "step_command"
    ),
    "small-step": Command(
        "bench.steps.SmallStepConfig",
        "a step of a small network over one of AdamW, and with dropout over without",
        "small_step_command",
    ),
    "network-step": Command(
        "bench.steps.NetworkStepConfig",
        "a step of K-FAC over one of SGD on convolutions, attention and an LSTM",
        "network_step_command",
    ),
    "import": Command(
        "bench.import_time.ImportConfig",
        "what `import kronfac` takes beyond torch's own import",
        "import_command",
    ),
    "ranks": Command(
        "bench.ranks.RanksConfig",
        "steps in 1, 2 and 4 processes: seconds and bytes",
        "ranks_command",
    ),
    "mnist": Command(
        "bench.mnist.MnistConfig",
        "examples to the authors' error on MNIST by defaults, against a threshold",
        "mnist_command",
    ),
    "authors-run": Command(
        "bench.authors_run.AuthorsRunConfig",
        "K-FAC with the paper's constants on MNIST, beside the authors' logged run",
        "authors_run_command",
    ),
}
COMMANDS: dict[str, Command | Group] = {
    "train": Command(
        "train.TrainConfig",
        "train a network of the paper, or on your own data; resume a run",
        "train_command",
        defaults="saved_config",
    ),
    "figure": Command(
        "figures.FigureConfig", "make a figure of the paper, as PNG, PDF and CSV", "figure_command"
    ),
    "race": Command(
        "race.command.RaceConfig",
        "race optimizers on problems in equal seconds or steps; every run is kept",
        "race_command",
    ),
    "results": Command(
        "race.pages.ResultsConfig",
        "render a page of results from the committed runs; repeat them with --run",
        "results_command",
    ),
    "bench": Group("measure what K-FAC costs and what it gains", BENCHMARKS),
    "demo": Command(
        "demo.DemoConfig",
        "two minutes of kronfac's optimizers beside Nesterov momentum and AdamW, ending in a page",
        "demo_command",
    ),
}


class UsageError(Exception):
    """Options that do not parse."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"kronfac {importlib.import_module('kronfac').__version__}")
        return 0
    program = "kronfac"
    command: Command | Group = Group(
        "K-FAC and the experiments of Martens and Grosse (2015)", COMMANDS
    )
    while isinstance(command, Group):
        name = words.pop(0) if words else None
        if name is None or name in ("-h", "--help"):
            print(_help(program, command), file=sys.stdout if name else sys.stderr)
            return 0 if name else 2
        if name not in command.commands:
            names = ", ".join(command.commands)
            return _fail(program, f"no command {name!r}; there are {names}", 2)
        program, command = f"{program} {name}", command.commands[name]
    # Runs show these events in their own way; a warning would tear the progress bar.
    warnings.filterwarnings("ignore", r"KFAC (refused|rejected) a step", UserWarning)
    try:
        _run(command, program, words)
    except SystemExit as done:  # --help
        return done.code if isinstance(done.code, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
            raise
        return _fail(program, *_explain(error))
    return 0


def _run(command: Command, program: str, arguments: list[str]) -> None:
    package, _, options = command.config.rpartition(".")
    module = importlib.import_module(f"kronfac_experiments.{package}")
    if "pooch" in sys.modules:  # tells of every download, also of those that then fail
        sys.modules["pooch"].get_logger().setLevel(logging.WARNING)
    kind = getattr(module, options)
    config = _parse(kind, program, arguments)
    if command.defaults is not None:
        defaults = getattr(module, command.defaults)(config)
        if defaults is not None:
            config = _parse(kind, program, arguments, defaults)
    written = getattr(module, command.run)(config)
    for path in [written] if isinstance(written, Path) else written or []:
        print(f"Wrote {path}")


def _parse(kind: type, program: str, arguments: list[str], default: Any = None) -> Any:
    """The options; what tyro would put in a box becomes a line."""
    import tyro  # noqa: PLC0415 - an extra, and `kronfac --help` should work without

    more = {} if default is None else {"default": default}
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(kind, prog=program, args=arguments, **more)
    except SystemExit as done:
        if done.code in (None, 0):
            raise
        raise UsageError(_unboxed(box.getvalue())) from None


def _unboxed(text: str) -> str:
    """The first paragraph of the message in one of tyro's boxes, in one line.

    Where the terminal can draw, the title is part of the frame; elsewhere it is a first paragraph.
    """
    paragraphs: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        inside = line.strip("│ ")
        if line.startswith(("╭", "╰")):
            continue
        if re.fullmatch(r"[─-]{3,}", inside):
            paragraphs.append([])
        else:
            paragraphs[-1].append(inside)
    first = paragraphs[0] if "╭" in text or len(paragraphs) == 1 else paragraphs[1]
    message = " ".join(" ".join(first).split()).rstrip(".")
    message = re.sub(r"^Error parsing (?!-)\S+: ", "", message)
    return re.sub(
        r"^Error parsing (\S+): no type matching (?:\{None\}\|)?(.+?) could be instantiated from "
        r"\[(.*?)\].*",
        r"\1 is \2; got \3",
        message,
    )


def _explain(error: BaseException) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    message = " ".join(str(error).split())
    code = getattr(error, "exit_code", 1)
    match error:
        case KeyboardInterrupt():
            message, code = "interrupted", 130
        case UsageError():
            message, code = f"{message}; see --help", 2
        case ModuleNotFoundError() if not str(error.name).startswith("kronfac"):
            message = f"{error.name} is not installed; pip install kronfac-experiments"
        case KronfacError() | ValueError() | FileNotFoundError() | NotADirectoryError():
            code = getattr(error, "exit_code", 2)
        case OSError() | ModuleNotFoundError():
            pass
        case _:
            hint = f"set {DEBUG_VARIABLE}=1 for the traceback"
            message = f"unexpected {type(error).__name__}: {message} ({hint})"
    return message, code


def _fail(program: str, message: str, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr)
    return code


def _help(program: str, group: Group) -> str:
    width = max(map(len, group.commands))
    return "\n".join(
        [
            f"usage: {program} COMMAND [OPTIONS]",
            "",
            f"{group.summary[0].upper()}{group.summary[1:]}.",
            "",
            *(f"  {name:<{width}}  {command.summary}" for name, command in group.commands.items()),
            "",
            f"{program} COMMAND --help shows the options, their units and defaults.",
            *(["kronfac --version shows the version."] if group.commands is COMMANDS else []),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
