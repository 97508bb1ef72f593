"""kill -9 at any line and at any sync, again and again: the end is the same to the bit.

    python -m tests.experiments.test_kill_points FOLDER

is a process that has imported all that a run needs, and forks a `kronfac` for every job. A job is a line of
JSON on standard input: the `words` of the command, the `log` to write its output to, and where it is
killed: before the n-th `line` of code that is executed in `WATCHED`, or at the n-th `sync`, when half of
what was not synced before is lost. The answer has its exit code and how many lines and syncs it came to.
"""

import json
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kronfac
import kronfac_experiments
from tests.experiments.runs import TINY, assert_same_run, train, write_cases
from tests.experiments.runs import kronfac as command

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

LIBRARY, EXPERIMENTS = Path(kronfac.__file__).parent, Path(kronfac_experiments.__file__).parent
NAMES = ("run_directory", "files", "train", "session", "optimizers")
WATCHED = {
    *(str(EXPERIMENTS / f"{name}.py") for name in NAMES),
    *map(str, (LIBRARY / "step").glob("*.py")),
}
"""What decides the order of writes, and what is in memory then."""
RUNS = {
    "kfac": "",
    "tridiagonal": "--inverse block_tridiagonal --preset paper --batch paper --average 5",
    "ekfac": "--inverse ekfac --batch adaptive --dtype float64",
    "nag": "--optimizer nag --average 7",
}


def work(job, answer):
    """The child: run the command, be killed or report how far it came."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    counts, synced, fsync = {"line": 0, "sync": 0}, {}, os.fsync

    def trace(frame, event, _):
        if frame.f_code.co_filename not in WATCHED:
            return None
        if event == "line":
            counts["line"] += 1
            if counts["line"] == job.get("line"):
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def count_sync(descriptor):
        counts["sync"] += 1
        status = os.fstat(descriptor)
        if counts["sync"] == job.get("sync"):
            if stat.S_ISREG(status.st_mode):
                safe = min(synced.get(status.st_ino, 0), status.st_size)
                os.ftruncate(descriptor, (safe + status.st_size) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)
        synced[status.st_ino] = status.st_size

    os.fsync = count_sync
    sys.settrace(trace)
    code = command(*job["words"])
    sys.settrace(None)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps(counts | {"code": code}).encode())


def serve(folder):
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(folder / "warm_up.log", os.O_WRONLY | os.O_CREAT), 1)
    assert train(write_cases(folder, "warm_up.npz"), folder / "warm_up", "--iterations", 2) == 0
    tasks = Path("/proc/self/task")
    assert not tasks.is_dir() or len(list(tasks.iterdir())) == 1, "a fork would lose threads"
    sys.stdout.flush()
    for line in sys.stdin:
        receiving, sending = os.pipe()
        child = os.fork()
        if not child:
            try:
                work(json.loads(line), sending)
            finally:
                os._exit(0)
        os.close(sending)
        with os.fdopen(receiving) as stream:
            counts = stream.read()
        _, status = os.waitpid(child, 0)
        code = {"code": os.waitstatus_to_exitcode(status)}
        print(json.dumps(json.loads(counts) if counts else code), file=answers, flush=True)


@pytest.fixture(scope="module")
def run_job(tmp_path_factory):
    """Runs a command in a process of its own, which is killed at the point if one is given."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.experiments.test_kill_points",
            str(tmp_path_factory.mktemp("server")),
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(words, log, **point):
        job = {"words": list(map(str, words)), "log": str(log), **point}
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.communicate()


@pytest.mark.parametrize(
    ("name", "count"),
    [("kfac", 6), *(pytest.param(name, 50, marks=pytest.mark.slow) for name in RUNS)],
)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(
    name, count, run_job, tmp_path
):
    words = ("train", "--data", write_cases(tmp_path), *TINY, "--iterations", 24)
    words += (*RUNS[name].split(), "--checkpoint-every", 0)
    whole = tmp_path / "whole"
    most = run_job((*words, "--run-dir", whole), tmp_path / "whole.log")
    assert most["code"] == 0, (tmp_path / "whole.log").read_text()
    for k in range(count):
        chance, run, log = random.Random(f"{name}, {k}"), tmp_path / str(k), tmp_path / f"{k}.log"
        kind = "sync" if k % 5 == 1 else "line"
        point, kills = {kind: chance.randint(1, most[kind])}, []
        while True:
            again = ("train", "--resume", run, "--checkpoint-every", 0)
            begun = (run / "config.json").is_file()
            answer = run_job(again if begun else (*words, "--run-dir", run), log, **point)
            if answer["code"] != -signal.SIGKILL:
                break
            kills.append(point)
            more = chance.random() < 0.5 and len(kills) < 6
            point = {"line": chance.randint(1, most["line"])} if more else {}
        said = log.read_text()
        ended = answer["code"] == 2 and "has ended already" in said.splitlines()[-1]
        assert kills
        assert answer["code"] == 0 or ended, (kills, said)
        assert_same_run(whole, run)
        assert not list(run.glob(".*")), kills


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
