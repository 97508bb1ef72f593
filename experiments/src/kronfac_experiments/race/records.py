"""Runs and step costs as lines of a JSONL file, which is committed: appended, never repeated."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import kronfac
from kronfac_experiments.race.contestants import Contestant, Settings
from kronfac_experiments.run_directory import RunError

STEP, EXAMPLES, SECONDS, TRAINING, VALIDATION, METRIC = range(6)
"""Columns of a row."""


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Args:
        problem: Its name.
        contestant: Its name.
        settings: Learning rate, weight decay, mini-batch and what else the contestant has.
        seed: Seed of initial parameters, mini-batches and dropout.
        budget: `{"seconds": 30.0}` or `{"steps": 1000}`.
        schedule: Of the learning rate.
        threads: CPU threads.
        code: Version of the code that ran.
        rows: Step, examples, seconds, training loss, validation loss and metric at each evaluation.
        message: Why it ended before its time.
        state_bytes: Bytes of the optimizer's state at the end.
        machine: Processor and version of torch.
    """

    problem: str
    contestant: str
    settings: Settings
    seed: int
    budget: dict[str, float]
    schedule: str
    threads: int
    code: str
    rows: list[list[float]]
    message: str = ""
    state_bytes: int = 0
    machine: str = ""

    @property
    def key(self) -> str:
        """What tells it from other runs."""
        return key(
            self.problem, self.contestant, self.settings, self.seed, self.budget, self.schedule,
            self.threads, self.code,
        )  # fmt: skip

    def last(self, column: int) -> float:
        """The number at the end; ∞ for a run that failed."""
        return float("inf") if self.message or not self.rows else self.rows[-1][column]

    def lowest(self, column: int) -> float:
        """The lowest number of all evaluations; ∞ for a run that failed at once."""
        return min((row[column] for row in self.rows), default=float("inf"))


@dataclass(frozen=True)
class Cost:
    """What the steps of a contestant cost, by which a budget in seconds becomes one in steps.

    Args:
        problem: Its name.
        contestant: Its name.
        batch: Size of the mini-batch; None is all examples.
        threads: CPU threads.
        code: Version of the code that ran.
        start: Seconds that the first steps take beyond those of later ones.
        step: Seconds of a later step.
    """

    problem: str
    contestant: str
    batch: float | None
    threads: int
    code: str
    start: float
    step: float

    @property
    def key(self) -> str:
        """What tells it from other costs."""
        return key("cost", self.problem, self.contestant, self.batch, self.threads, self.code)

    def steps_in(self, seconds: float) -> int:
        """Steps that fit."""
        return max(1, int((seconds - self.start) / self.step))


def key(*parts: Any) -> str:
    """A text that is equal for equal parts."""
    return json.dumps(parts, sort_keys=True)


@cache
def code_of(contestant: Contestant) -> str:
    """The version of the code that decides a contestant's runs.

    For K-FAC a digest of the library's source; for others torch's version.
    """
    if not contestant.curvature:
        return f"torch {torch.__version__.partition('+')[0]}"
    digest = hashlib.sha256()
    folder = Path(kronfac.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"kronfac {kronfac.__version__} {digest.hexdigest()[:8]}"


class Records:
    """The runs in a file, by key.

    Args:
        path: The JSONL file; made with its folder when the first run ends.

    Raises:
        RunError: a line that is not the last one is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, Run] = {}
        self._costs: dict[str, Cost] = {}
        for item in _read(path):
            self._add(item)

    def _add(self, item: Run | Cost) -> None:
        if isinstance(item, Cost):
            self._costs[item.key] = item
        else:
            self._runs[item.key] = item

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, name: str) -> Run | None:
        """The run with this key."""
        return self._runs.get(name)

    def cost(self, name: str) -> Cost | None:
        """The cost with this key."""
        return self._costs.get(name)

    def append(self, item: Run | Cost) -> None:
        """Keep a run or a cost, on the disk before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_unfinished_line(self.path)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._add(item)


def _drop_unfinished_line(path: Path) -> None:
    """Cut what was being written when the machine stopped."""
    if path.is_file():
        content = path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)


def _read(path: Path) -> Iterator[Run | Cost]:
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            yield (Run if "rows" in content else Cost)(**content)
        except (ValueError, TypeError) as error:
            if number == len(lines):  # unfinished, see `_drop_unfinished_line`
                continue
            raise RunError(f"Line {number} of {path} is damaged: {error}. Delete it.") from error
