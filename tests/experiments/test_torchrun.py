"""`kronfac train` on several processes: what one process would do, also after a worker was lost."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kronfac.distributed import World
from kronfac_experiments import ranks
from tests.experiments.runs import (
    assert_same_run,
    checkpoint,
    kronfac,
    rows,
    write_cases,
)

TINY = ("--layers", "16,8,3", "--threads", "1")
UNEVEN = (*TINY, "--batch", "41", "--dtype", "float64", "--iterations", "20")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def torchrun(folder, count, *words):
    """Real `torchrun`, of the console script's module."""
    launch = ("--standalone", "--nproc-per-node", count)
    command = ("-m", "torch.distributed.run", *launch, "-m", "kronfac_experiments.cli", "train")
    return subprocess.Popen(
        [sys.executable, *map(str, (*command, *words))],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return out


def parameters(run):
    return torch.cat([p.reshape(-1) for p in checkpoint(run)["model"].values()])


@pytest.mark.parametrize(("m", "n"), [(7, 2), (4, 4), (41, 4), (5, 1)])
def test_parts_of_a_mini_batch_are_the_mini_batch(m, n):
    drawn = torch.randperm(m)
    parts = [ranks.own_part(drawn, world(r, n)) for r in range(n)]
    assert torch.equal(torch.cat(parts), drawn)
    assert {len(part) - m // n for part in parts} <= {0, 1}


def test_a_mini_batch_of_fewer_examples_than_ranks_is_refused():
    with pytest.raises(ValueError, match=r"of 3 case\(s\) can't be divided among 4 processes"):
        ranks.own_part(torch.arange(3), world(0, 4))


def world(rank, size):
    found = World()
    found.rank, found.size = rank, size
    return found


def test_a_run_of_two_ranks_ends_where_that_of_one_process_does(tmp_path):
    data = write_cases(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    several = torchrun(tmp_path, 2, "--data", data, *UNEVEN, "--run-dir", two)
    assert kronfac("train", "--data", data, *UNEVEN, "--run-dir", one) == 0
    out = finished(several)
    assert out.count("Stopped after 20 iterations") == 1, "rank 0 alone shows anything"
    assert_close(one, two)


def assert_close(one, two):
    expected, found = parameters(one), parameters(two)
    assert float((found - expected).norm() / expected.norm()) <= 1e-10
    assert len(rows(one)) == len(rows(two)) == checkpoint(one)["iteration"] + 1
    for row, other in zip(rows(one), rows(two), strict=True):
        assert row["cases"] == other["cases"]
        assert (row["loss"] or 0) == pytest.approx(other["loss"] or 0, rel=1e-8)
    assert rows(one)[-1]["test_error"] == pytest.approx(rows(two)[-1]["test_error"], rel=1e-8)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--optimizer adamw",
        "--optimizer nag --average 7",
        "--inverse block_tridiagonal --preset paper --average 5",
        "--inverse ekfac --batch adaptive",
    ],
)
def test_every_optimizer_ends_where_one_process_does(words, tmp_path):
    data = write_cases(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    given = ("--data", data, *UNEVEN, *words.split())
    assert kronfac("train", *given, "--run-dir", one) == 0
    finished(torchrun(tmp_path, 4, *given, "--run-dir", two))
    assert_close(one, two)


@pytest.mark.slow
def test_lbfgs_ends_where_one_process_does(tmp_path):
    """On all examples, for two iterations of 20 steps each: later on it multiplies rounding errors."""
    data = write_cases(tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    given = ("--data", data, *TINY, "--batch", 167, "--dtype", "float64", "--optimizer", "lbfgs")
    given = (*given, "--iterations", 2)
    assert kronfac("train", *given, "--run-dir", one) == 0
    finished(torchrun(tmp_path, 4, *given, "--run-dir", two))
    assert_close(one, two)


@pytest.mark.parametrize(("count", "kills"), [(2, 1), pytest.param(4, 5, marks=pytest.mark.slow)])
def test_a_run_that_lost_workers_and_is_resumed_ends_as_an_undisturbed_one(count, kills, tmp_path):
    data, generator = write_cases(tmp_path), random.Random(0)
    words = ("--data", data, *TINY, "--batch", 41, "--checkpoint-every", 0, "--iterations", 100)
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    finished(torchrun(tmp_path, count, *words, "--run-dir", whole))
    for kill in range(kills):
        again = ("--resume", lost) if kill else (*words, "--run-dir", lost)
        process = torchrun(tmp_path, count, *again)
        wait_for_rows(lost, 15 * kill + generator.randrange(5, 15), process)
        os.kill(generator.choice(children(process.pid)), signal.SIGKILL)
        process.communicate(timeout=300)
        assert process.returncode != 0
    finished(torchrun(tmp_path, count, "--resume", lost))
    assert_same_run(whole, lost)


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_rows(run, count, process):
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
