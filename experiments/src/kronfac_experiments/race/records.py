"""Runs and step costs as lines of a JSONL file, which is committed: appended, never repeated."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

import kronfac
from kronfac_experiments.files import lock, try_lock
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
        weight_bytes: Bytes of the trained parameters.
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
    weight_bytes: int = 0
    machine: str = ""

    @property
    def key(self) -> str:
        """What tells it from other runs of the same code."""
        return key(
            self.problem, self.contestant, self.settings, self.seed, self.budget, self.schedule,
            self.threads,
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
        """What tells it from other costs of the same code."""
        return cost_key(self.problem, self.contestant, self.batch, self.threads)

    def steps_in(self, seconds: float) -> int:
        """Steps that fit."""
        return max(1, int((seconds - self.start) / self.step))


def key(*parts: Any) -> str:
    """A text that is equal for equal parts."""
    return json.dumps(parts, sort_keys=True)


def cost_key(problem: str, contestant: str, batch: float | None, threads: int) -> str:
    """The key of a cost."""
    return key("cost", problem, contestant, batch, threads)


@cache
def code_of(contestant: Contestant) -> str:
    """The version of the code that decides a contestant's runs.

    For kronfac's optimizers a digest of the library's source; for others torch's version.
    """
    if contestant.code == "torch":
        return f"torch {torch.__version__.partition('+')[0]}"
    digest = hashlib.sha256()
    folder = Path(kronfac.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"kronfac {kronfac.__version__} {digest.hexdigest()[:8]}"


class Records:
    """The runs and costs in a file, which several processes may append to.

    Args:
        path: The JSONL file; made with its folder when the first run ends.

    Raises:
        RunError: a line that is not the last one is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: dict[str, dict[str, Run | Cost]] = {}
        self.read()

    def read(self) -> None:
        """Read what is in the file now."""
        self._kept = {}
        for item in _read(self.path):
            self._add(item)

    def _add(self, item: Run | Cost) -> None:
        by_code = self._kept.setdefault(item.key, {})
        by_code.pop(item.code, None)  # so that the newest comes last
        by_code[item.code] = item

    def __iter__(self) -> Iterator[Run]:
        items = (item for by_code in self._kept.values() for item in by_code.values())
        return (item for item in items if isinstance(item, Run))

    def find(self, name: str, code: str | None) -> Run | Cost | None:
        """The run or cost with this key, of this code or, if that is None, of the newest."""
        by_code = self._kept.get(name, {})
        return next(reversed(by_code.values()), None) if code is None else by_code.get(code)

    def append(self, item: Run | Cost) -> None:
        """Keep a run or a cost, on the disk before this returns."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as stream:
            lock(stream)
            _drop_unfinished_line(stream)
            stream.write(json.dumps(asdict(item), ensure_ascii=False).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._add(item)

    @contextmanager
    def claimed(self, problem: str) -> Iterator[bool]:
        """Whether no other process is running this problem; none will while this context is open."""
        name = hashlib.sha256(f"{self.path.resolve()} {problem}".encode()).hexdigest()[:16]
        with (Path(tempfile.gettempdir()) / f"kronfac-race-{name}.lock").open("wb") as stream:
            free = try_lock(stream)
            if free:
                self.read()
            yield free


def _drop_unfinished_line(stream: IO[bytes]) -> None:
    """Cut what was being written when the machine stopped."""
    stream.seek(0)
    content = stream.read()
    stream.truncate(content.rfind(b"\n") + 1)


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
