"""A process that has imported all that a run needs, and forks a `kronfac` for every job, to be killed.

    python -m tests.experiments.kill_server FOLDER

Importing torch takes seconds, and training a tiny network a fraction of one. A job is a line of JSON on
standard input: `words` of the command, `log` to write its output to, and where it is killed:

- `line`: SIGKILL before the n-th line of code that is executed in `WATCHED`
- `writing`: the same, counting lines of `WRITING` alone
- `sync`: SIGKILL at the n-th fsync; of what was not synced before, a part is lost (`kept` of it is not)
- `seconds`: SIGKILL after this time, wherever it is

The answer is a line with its exit code and how many lines and syncs it came to, if it was not killed.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import kronfac
import kronfac_experiments
from tests.experiments.runs import kronfac as command
from tests.experiments.runs import train, write_cases

LIBRARY, EXPERIMENTS = Path(kronfac.__file__).parent, Path(kronfac_experiments.__file__).parent
WRITERS = ("run_directory", "checkpoint_files", "checkpoint", "atomic_files", "file_lock")
WRITING = {str(EXPERIMENTS / f"{name}.py") for name in WRITERS}
WATCHED = {
    *WRITING,
    *(str(EXPERIMENTS / f"{name}.py") for name in ("train", "session", "optimizers")),
    *(str(LIBRARY / f"{name}.py") for name in ("kfac", "step/take", "step/commit", "step/state")),
    *map(str, (LIBRARY / "training").glob("*.py")),
}
"""What decides the order of writes, and what is in memory then."""


class Killer:
    """Counts lines and syncs of this process, and ends it at one of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._line, self._writing = job.get("line"), job.get("writing")
        self._sync = job.get("sync")
        self._kept = job.get("kept", 1.0)
        self.lines = self.writing = self.syncs = 0
        self._synced: dict[int, int] = {}  # length by inode
        self._fsync = os.fsync

    def install(self) -> None:
        os.fsync = self._count_sync
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            self.lines += 1
            self.writing += frame.f_code.co_filename in WRITING
            if self.lines == self._line or self.writing == self._writing:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._trace

    def _count_sync(self, descriptor: int) -> None:
        self.syncs += 1
        status = os.fstat(descriptor)
        if self.syncs == self._sync:
            if stat.S_ISREG(status.st_mode):
                safe = min(self._synced.get(status.st_ino, 0), status.st_size)
                os.ftruncate(descriptor, safe + round(self._kept * (status.st_size - safe)))
            os.kill(os.getpid(), signal.SIGKILL)
        self._fsync(descriptor)
        self._synced[status.st_ino] = status.st_size


def work(job: dict[str, Any], answer: int) -> None:
    """The child: run the command, and report if it was not killed."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    killer = Killer(job)
    killer.install()
    code = command(*job["words"])
    sys.settrace(None)
    sys.stdout.flush()
    sys.stderr.flush()
    counts = {"code": code, "lines": killer.lines, "writing": killer.writing}
    counts["syncs"] = killer.syncs
    os.write(answer, json.dumps(counts).encode())


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The parent: what became of the child."""
    began = time.monotonic()
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            work(job, sending)
        finally:
            os._exit(0)
    os.close(sending)
    if "seconds" in job:
        time.sleep(job["seconds"])
        os.kill(child, signal.SIGKILL)
    with os.fdopen(receiving) as stream:
        counts = stream.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    answer = json.loads(counts) if counts else {"code": code}
    return answer | {"took": time.monotonic() - began}


def serve(folder: Path) -> None:
    torch.set_num_threads(1)
    standard_output = os.dup(1)
    os.dup2(os.open(folder / "warm_up.log", os.O_WRONLY | os.O_CREAT), 1)
    assert train(write_cases(folder, "warm_up.npz"), folder / "warm_up", "--iterations", 2) == 0
    tasks = Path("/proc/self/task")
    assert not tasks.is_dir() or len(list(tasks.iterdir())) == 1, "a fork would lose threads"
    sys.stdout.flush()
    with os.fdopen(standard_output, "w") as answers:
        for line in sys.stdin:
            print(json.dumps(run(json.loads(line))), file=answers, flush=True)


class KillServer:
    """The other end: a context that starts the server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> "KillServer":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.experiments.kill_server", str(self._folder)],
            cwd=Path(__file__).resolve().parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def __call__(self, words: tuple[object, ...], log: Path, **point: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"words": list(map(str, words)), "log": str(log), **point}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
