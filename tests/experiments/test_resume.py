import json
import signal
import time

import pytest
import torch

from kronfac_experiments.interrupt import Interrupts
from tests.experiments.runs import (
    assert_same_run,
    checkpoint,
    kronfac,
    rows,
    start_process,
    train,
    write_cases,
)

KFAC = ("--inverse", "block_tridiagonal", "--preset", "paper", "--batch", "paper", "--average", 20)


@pytest.fixture
def data(tmp_path):
    return write_cases(tmp_path)


def wait_for_rows(run, count, process):
    """Until the run has written so many rows and a checkpoint on the way."""
    metrics, saved = run / "metrics.jsonl", run / "checkpoint.pt"

    def reached():
        written = saved.is_file() and metrics.read_bytes().count(b"\n") > count
        return written and checkpoint(run)["iteration"] > 0

    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def launch(data, run, tmp_path, *words):
    command = ("train", "--data", data, "--layers", "16,8,3", "--threads", 1, "--batch", 40)
    options = ("--no-tensorboard", "--run-dir", run, "--checkpoint-every", 0.1, *words)
    return start_process(*command, *options, folder=tmp_path)


def test_a_killed_run_that_is_resumed_equals_the_uninterrupted_one(data, tmp_path, capsys):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = launch(data, killed, tmp_path, *KFAC, "--iterations", 3000)
    wait_for_rows(killed, 30, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = checkpoint(killed)["iteration"]
    last = saved + 50
    # The worst moment to be killed in: half a line, long after the checkpoint.
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 999, "cases"')
    assert kronfac("train", "--resume", killed, "--iterations", last) == 0
    assert f"from iteration {saved}" in capsys.readouterr().out
    assert train(data, whole, *KFAC, "--iterations", last) == 0
    assert_same_run(whole, killed)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, data, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "a stopped run"
    limit = ("--iterations", 3000)
    process = launch(data, stopped, tmp_path, "--optimizer", "nag", *limit)
    wait_for_rows(stopped, 30, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    (line,) = err.splitlines()
    assert f"Continue with: kronfac train --resume '{stopped}'" in line
    assert "Traceback" not in out
    saved = checkpoint(stopped)["iteration"]
    assert rows(stopped)[-1]["iteration"] == saved
    further = saved + 7
    assert kronfac("train", "--resume", stopped, "--iterations", further) == 0
    assert train(data, whole, "--optimizer", "nag", "--iterations", further) == 0
    assert_same_run(whole, stopped)


def test_the_first_signal_is_remembered_and_the_second_one_stops_at_once():
    heard = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts(lambda: heard.append("saving")) as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.received == signal.SIGINT
        assert heard == ["saving"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    "words",
    ["--optimizer kfac", "--optimizer nag --average 7", "--optimizer adamw"],
)
def test_a_run_in_pieces_equals_the_run_in_one(words, data, tmp_path):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(data, whole, *words.split(), "--iterations", 30) == 0
    assert train(data, pieces, *words.split(), "--iterations", 10) == 0
    torch.manual_seed(123)  # nothing depends on what the process did in between
    assert kronfac("train", "--resume", pieces, "--iterations", 30) == 0
    assert_same_run_but_pictures(whole, pieces)


def assert_same_run_but_pictures(whole, pieces):
    (pieces / "reconstructions.npz").write_bytes((whole / "reconstructions.npz").read_bytes())
    assert_same_run(whole, pieces)


def test_checkpoints_are_written_whole(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 5, "--checkpoint-every", 0) == 0
    assert not list(run.glob(".*"))
    assert checkpoint(run)["metrics_bytes"] == (run / "metrics.jsonl").stat().st_size


MISTAKES = {
    "the end is reached": (lambda run: None, (), "has ended already, after 3 iterations"),
    "another seed": (lambda run: None, ("--seed", 4), "--seed 4 (was 0)"),
    "another optimizer": (lambda run: None, ("--optimizer", "nag"), "--optimizer nag (was kfac)"),
    "two folders": (lambda run: None, ("--run-dir", "x"), "--run-dir x (was None)"),
    "no configuration": (lambda run: (run / "config.json").unlink(), (), "has no config.json"),
    "damaged configuration": (
        lambda run: (run / "config.json").write_text("{"),
        (),
        "config.json is damaged",
    ),
    "foreign configuration": (
        lambda run: (run / "config.json").write_text("[]"),
        (),
        "not of a run that this kronfac can continue",
    ),
    "other data": (
        lambda run: write_cases(run.parent, cases=torch.rand(200, 16).numpy()),
        ("--iterations", 5),
        "has changed since that run began",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_resume_is_refused_in_one_line(mistake, data, tmp_path, capsys):
    break_, words, message = MISTAKES[mistake]
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 3) == 0
    break_(run)
    capsys.readouterr()
    assert kronfac("train", "--resume", run, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_an_incomplete_configuration_is_refused(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 3) == 0
    written = json.loads((run / "config.json").read_text())
    del written["batch"]
    (run / "config.json").write_text(json.dumps(written))
    assert kronfac("train", "--resume", run) == 2
    assert "batch" in capsys.readouterr().err


def test_a_run_from_before_an_option_was_there_goes_on(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 2) == 0
    configuration = json.loads((run / "config.json").read_text())
    assert configuration.pop("ddp") is False
    (run / "config.json").write_text(json.dumps(configuration))
    assert kronfac("train", "--resume", run, "--iterations", 3) == 0
