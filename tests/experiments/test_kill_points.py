"""kill -9 at any line, at any sync and at any time, again and again: the end is the same to the bit.

Processes are real; `kill_server.py` forks them from one that has torch imported.
"""

import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.experiments.kill_server import KillServer
from tests.experiments.runs import TINY, assert_same_run, write_cases

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

ITERATIONS = 24
RUNS = {
    "kfac": "",
    "tridiagonal": "--inverse block_tridiagonal --preset paper --batch paper --average 5",
    "ekfac": "--inverse ekfac --batch adaptive --dtype float64",
    "nag": "--optimizer nag --average 7",
}
NIGHTLY_POINTS = 50
"""Kill points of each run: 200 in all."""


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed, and how many places there are in it to be killed at."""

    words: tuple[object, ...]
    folder: Path
    lines: int
    syncs: int
    seconds: float

    def point(self, kind: str, chance: random.Random) -> dict[str, float]:
        if kind == "line":
            return {"line": chance.randint(1, self.lines)}
        if kind == "sync":
            kept = chance.choice([0.0, chance.random(), 1.0])
            return {"sync": chance.randint(1, self.syncs), "kept": kept}
        return {"seconds": chance.uniform(0, self.seconds)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with KillServer(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def wholes(server, tmp_path_factory):
    """Undisturbed runs by name, made when they are first asked for."""
    folder = tmp_path_factory.mktemp("whole")
    data, made = write_cases(folder), {}

    def whole(name):
        if name not in made:
            words = ("train", "--data", data, *TINY, "--iterations", ITERATIONS)
            words += (*RUNS[name].split(), "--checkpoint-every", 0)
            log = folder / f"{name}.log"
            answer = server((*words, "--run-dir", folder / name), log)
            assert answer["code"] == 0, log.read_text()
            made[name] = Whole(
                words, folder / name, answer["lines"], answer["syncs"], answer["took"]
            )
        return made[name]

    return whole


def survive(server, whole, folder, point, chance):
    """Start, be killed at the point, resume, be killed at others, and so on to the end."""
    run, log = folder / "run", folder / "log"
    kills = []
    while True:
        words = (*whole.words, "--run-dir", run)
        if (run / "config.json").is_file():
            words = ("train", "--resume", run, "--checkpoint-every", chance.choice([0, 0.01]))
        answer = server(words, log, **point)
        if answer["code"] != -signal.SIGKILL:
            break
        kills.append(point)
        again = chance.random() < 0.5 and len(kills) < 6
        kind = chance.choice(["line", "line", "sync", "seconds"])
        point = whole.point(kind, chance) if again else {}
    said = log.read_text()
    ended = answer["code"] == 2 and "has ended already" in said.splitlines()[-1]
    assert answer["code"] == 0 or ended, (kills, said)
    try:
        assert_same_run(whole.folder, run)
    except AssertionError as error:
        raise AssertionError(f"killed at {kills}: {said}") from error
    assert not list(run.glob(".*")), kills
    return kills


def points(server, wholes, name, folder, count, kinds):
    whole = wholes(name)
    killed = 0
    for k in range(count):
        chance = random.Random(f"{name}, {k}")
        here = folder / str(k)
        here.mkdir()
        killed += bool(
            survive(server, whole, here, whole.point(kinds[k % len(kinds)], chance), chance)
        )
        shutil.rmtree(here)
    # A time may lie behind the end of a run that is faster than the one that was measured.
    assert killed >= count * (1 - kinds.count("seconds") / len(kinds))


def test_a_run_killed_at_a_few_points_ends_as_if_it_had_not_been(server, wholes, tmp_path):
    points(server, wholes, "kfac", tmp_path, 6, ["line", "sync", "seconds"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_many_points_ends_as_if_it_had_not_been(name, server, wholes, tmp_path):
    kinds = ["line", "line", "line", "line", "sync"]
    points(server, wholes, name, tmp_path, NIGHTLY_POINTS, kinds)


@pytest.mark.slow
def test_a_run_killed_at_random_times_ends_as_if_it_had_not_been(server, wholes, tmp_path):
    points(server, wholes, "kfac", tmp_path, 20, ["seconds"])


@pytest.mark.parametrize(
    "count",
    [pytest.param(4, id="few"), pytest.param(60, marks=pytest.mark.slow, id="many")],
)
def test_killed_while_it_turns_to_the_checkpoint_before(count, server, wholes, tmp_path):
    """At lines of a resume whose newest checkpoint is damaged: the good one is never lost."""
    whole = wholes("kfac")
    stopped, log = tmp_path / "stopped", tmp_path / "log"
    assert server((*whole.words, "--iterations", 20, "--run-dir", stopped), log)["code"] == 0
    file = stopped / "checkpoint.pt"
    file.write_bytes(file.read_bytes()[:1000])

    shutil.copytree(stopped, tmp_path / "unkilled")
    words = ("train", "--iterations", ITERATIONS, "--resume")
    writing = server((*words, tmp_path / "unkilled"), log)["writing"]
    for k in range(count):
        run = tmp_path / str(k)
        shutil.copytree(stopped, run)
        point = {"writing": 1 + k * (writing - 1) // (count - 1)}
        assert server((*words, run), log, **point)["code"] == -signal.SIGKILL
        answer = server((*words, run), log)
        ended = answer["code"] == 2 and "has ended already" in log.read_text().splitlines()[-1]
        assert answer["code"] == 0 or ended, (point, log.read_text())
        assert_same_run(whole.folder, run)
