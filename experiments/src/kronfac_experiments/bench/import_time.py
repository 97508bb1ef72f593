"""`kronfac bench import`: what `import kronfac` takes beyond torch's own import.

Fresh processes in turn, one that imports torch alone and one that imports kronfac too, by their CPU time:
the difference of the two is what kronfac adds. A third imports both without garbage collection. Byte code
is compiled before, as it is after the first import of an installed package, in a folder that is removed.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console

import kronfac
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described, publish

PROGRAM = """
import time
import torch
{}
start = time.process_time()
{}
end = time.process_time()
print(end - start, end)
"""


@dataclass(frozen=True)
class ImportConfig(BenchOptions):
    """What `import kronfac` takes beyond torch's own import."""

    threads: int = 1
    """CPU threads."""
    repeats: int = 9
    """Rounds of three processes; their median, smallest and largest are shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, repeats=self.repeats)


@dataclass(frozen=True)
class ImportTrial:
    """CPU seconds, a round of processes each."""

    torch: list[float]
    """A process that imports torch alone."""
    both: list[float]
    """A process that imports torch, then kronfac."""
    statement: list[float]
    """The statement `import kronfac` in that one."""
    uncollected: list[float]
    """The same statement in a process without garbage collection."""

    @property
    def added(self) -> list[float]:
        """What kronfac adds to a process, round by round."""
        return [both - alone for both, alone in zip(self.both, self.torch, strict=True)]


def import_command(config: ImportConfig) -> list[Path]:
    """Measure, show and write."""
    console = Console(highlight=False, soft_wrap=True)
    return publish(_document(config, measure(config)), config.output, console)


def measure(config: ImportConfig) -> ImportTrial:
    """Run the processes."""
    trial = ImportTrial([], [], [], [])
    with TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(config.threads),
            "PYTHONPATH": str(Path(kronfac.__file__).parents[1]),
            "PYTHONPYCACHEPREFIX": folder,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        _run("import kronfac", environment)
        for _ in range(config.repeats):
            _, alone = _run("pass", environment)
            statement, both = _run("import kronfac", environment)
            uncollected, _ = _run("import kronfac", environment, "import gc; gc.disable()")
            trial.torch.append(alone)
            trial.both.append(both)
            trial.statement.append(statement)
            trial.uncollected.append(uncollected)
    return trial


def _run(statement: str, environment: dict[str, str], before: str = "pass") -> tuple[float, float]:
    """CPU seconds of a statement after `import torch`, and of the whole process."""
    command = [sys.executable, "-c", PROGRAM.format(before, statement)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    part, whole = map(float, run.stdout.split())
    return part, whole


def _document(config: ImportConfig, trial: ImportTrial) -> Document:
    rows = [
        (label, f"{median(values):.3f}", f"{min(values):.3f} – {max(values):.3f}")
        for label, values in (
            ("a process that imports torch", trial.torch),
            ("what kronfac adds to it", trial.added),
            ("the statement `import kronfac`", trial.statement),
            ("the same without garbage collection", trial.uncollected),
        )
    ]
    note = (
        "CPU seconds. What kronfac adds is the difference of two processes, run one after the other. The "
        "last two lines differ by a garbage collection over all of torch's objects that falls into it."
    )
    return Document(
        title="The import of kronfac",
        command=command_line("bench import", config),
        settings=described(
            config.threads,
            config.seed,
            f"{config.repeats} rounds of three processes in turn",
            "CPU time",
        ),
        tables=(Table("Seconds", ("", "median", "smallest – largest"), rows, note),),
    )
