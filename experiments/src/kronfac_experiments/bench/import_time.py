"""`kronfac bench import`: what `import kronfac` takes beyond torch's own import.

Fresh processes in turn, one that imports torch alone and one that imports kronfac too, by their CPU time:
the difference of the two is what kronfac adds. Byte code is compiled before, as it is after the first
import of an installed package, in a folder that is removed.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import kronfac
from kronfac_experiments.bench import BenchOptions, publish, spread
from kronfac_experiments.options import at_least
from kronfac_experiments.pages.document import Table

PROGRAM = """
import time
import torch
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
    """Rounds of two processes; their median, smallest and largest are shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, repeats=self.repeats)


def import_command(config: ImportConfig) -> list[Path]:
    """Measure, show and write."""
    alone, statement, both = measure(config)
    added = [b - a for b, a in zip(both, alone, strict=True)]
    rows = [
        (label, spread(values, "{:.3f}".format))
        for label, values in (
            ("a process that imports torch", alone),
            ("what kronfac adds to it", added),
            ("the statement `import kronfac`", statement),
        )
    ]
    note = (
        "CPU seconds, median (smallest – largest). What kronfac adds is the difference of two processes, "
        "one after the other; a garbage collection over all of torch's objects may fall into it."
    )
    settings = f"{config.repeats} rounds of two processes", "CPU time"
    tables = (Table("Seconds", ("", "seconds"), rows, note),)
    return publish("import", "The import of kronfac", config, settings, tables)


def measure(config: ImportConfig) -> tuple[list[float], list[float], list[float]]:
    """CPU seconds of processes that import torch, of `import kronfac`, and of processes that do both."""
    alone, statement, both = [], [], []
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
            alone.append(_run("pass", environment)[1])
            part, whole = _run("import kronfac", environment)
            statement.append(part)
            both.append(whole)
    return alone, statement, both


def _run(statement: str, environment: dict[str, str]) -> tuple[float, float]:
    """CPU seconds of a statement after `import torch`, and of the whole process."""
    command = [sys.executable, "-c", PROGRAM.format(statement)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    part, whole = map(float, run.stdout.split())
    return part, whole
