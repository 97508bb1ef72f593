"""`kronfac train` on several processes: what one process would do, also if some of them are killed."""

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
    assert_identical,
    assert_same_run,
    checkpoint,
    kronfac,
    rows,
    write_cases,
)

ROOT = Path(__file__).parents[2]
TINY = ("--layers", "16,8,3", "--threads", "1", "--no-tensorboard")
UNEVEN = (*TINY, "--batch", "41", "--dtype", "float64", "--iterations", "20")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def torchrun(folder, count, *words, restarts=0):
    """Real `torchrun`, of the console script's module."""
    launch = ("--standalone", "--nproc-per-node", count, "--max-restarts", restarts)
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


def killed(folder, count, kills, seed, *words):
    """Two runs, in one of which ranks were killed; the rows that it had each time."""
    command = ("tests.experiments.killed_ranks", folder, count, kills, seed, *words)
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(n) for n in done.stdout.rsplit("killed at rows:", 1)[1].split()]


def test_two_ranks_of_which_one_is_killed_end_as_undisturbed_ones(tmp_path):
    words = ("--data", write_cases(tmp_path), *TINY, "--batch", 41, "--iterations", 20)
    assert any(killed(tmp_path, 2, 3, 0, *words, "--checkpoint-every", 0))
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def assert_equal_to_rounding(one, other):
    """In float64; the buckets of DistributedDataParallel, and so its sums, are others after a start."""
    assert float((parameters(other) - parameters(one)).norm() / parameters(one).norm()) <= 1e-10
    assert len(rows(one)) == len(rows(other))
    for name in ("iteration", "cases", "sampler", "random"):
        assert_identical(checkpoint(one)[name], checkpoint(other)[name])


def test_two_ranks_with_ddp_of_which_one_is_killed_end_as_undisturbed_ones(tmp_path):
    words = ("--data", write_cases(tmp_path), *TINY, "--batch", 42, "--iterations", 20)
    words = (*words, "--checkpoint-every", 0, "--dtype", "float64")
    assert any(killed(tmp_path, 2, 3, 0, *words, "--ddp"))
    assert_equal_to_rounding(tmp_path / "whole", tmp_path / "killed")
    assert '"ddp": true' in (tmp_path / "killed" / "config.json").read_text()
    # Equal parts: the mean of the ranks' means is that of one process.
    assert kronfac("train", *words, "--run-dir", tmp_path / "one") == 0
    assert_equal_to_rounding(tmp_path / "one", tmp_path / "killed")


def test_ddp_is_for_several_processes(tmp_path, capsys):
    assert kronfac("train", "--data", write_cases(tmp_path), *TINY, "--ddp") != 0
    assert "--ddp is for several processes" in capsys.readouterr().err


KINDS = {
    "block_diagonal": "--batch 41",
    "paper": "--inverse block_tridiagonal --preset paper --batch paper --average 5",
    "ekfac": "--inverse ekfac --batch adaptive --dtype float64",
    "nag": "--optimizer nag --average 7 --batch 41",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_four_ranks_that_are_killed_end_as_undisturbed_ones(kind, seed, tmp_path):
    words = ("--data", write_cases(tmp_path), *TINY, *KINDS[kind].split(), "--iterations", 30)
    assert len(killed(tmp_path, 4, 10, seed, *words, "--checkpoint-every", 0)) >= 5
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


MNIST = (
    *("mnist16", "--threads", 1, "--no-tensorboard", "--batch", 400, "--iterations", 30),
    *("--checkpoint-every", 0, "--evaluation-cases", 1000),
)


@pytest.mark.slow
def test_four_ranks_on_mnist_of_which_one_is_killed_ten_times(real_data, tmp_path):
    """It ends at the same parameters as an undisturbed one, bit for bit."""
    assert len(killed(tmp_path, 4, 10, 3, *MNIST)) == 10
    assert_same_run(tmp_path / "whole", tmp_path / "killed", pictures=False)


@pytest.mark.slow
def test_four_ranks_with_ddp_on_mnist_of_which_one_is_killed_ten_times(real_data, tmp_path):
    """It ends at the same parameters, to rounding."""
    assert len(killed(tmp_path, 4, 10, 4, *MNIST, "--dtype", "float64", "--ddp")) == 10
    assert_equal_to_rounding(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_four_ranks_with_ddp_in_several_buckets_that_are_killed_end_as_undisturbed_ones(tmp_path):
    """2.5 MB of gradients: two buckets at first, others from the second iteration after a start on."""
    words = ("--data", write_cases(tmp_path), "--layers", "16,500,300,3", "--threads", 1)
    words = (*words, "--no-tensorboard", "--batch", 40, "--dtype", "float64", "--iterations", 12)
    assert len(killed(tmp_path, 4, 5, 5, *words, "--checkpoint-every", 0, "--ddp")) >= 3
    assert_equal_to_rounding(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_torchrun_starts_lost_workers_again_and_the_run_goes_on(tmp_path):
    data, generator = write_cases(tmp_path), random.Random(0)
    words = ("--data", data, *TINY, "--batch", 41, "--checkpoint-every", 0, "--iterations", 150)
    whole, lost = tmp_path / "whole", tmp_path / "killed"
    finished(torchrun(tmp_path, 2, *words, "--run-dir", whole))
    process = torchrun(tmp_path, 2, *words, "--run-dir", lost, restarts=3)
    for kill in range(2):
        wait_for_rows(lost, 40 * kill + generator.randrange(10, 30), process)
        os.kill(generator.choice(children(process.pid)), signal.SIGKILL)
    finished(process)
    assert_same_run(whole, lost)


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_rows(run, count, process):
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
def test_a_restart_does_not_go_on_with_another_run(tmp_path):
    data, run = write_cases(tmp_path), tmp_path / "run"
    words = ("--data", data, *TINY, "--batch", 41, "--run-dir", run)
    assert kronfac("train", *words, "--iterations", 3) == 0
    before = (run / "metrics.jsonl").read_bytes()
    process = torchrun(tmp_path, 2, *words, "--iterations", 5, restarts=1)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "is there already, and runs are not overwritten" in err
    assert (run / "metrics.jsonl").read_bytes() == before
