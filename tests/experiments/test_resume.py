"""Runs that are killed, stopped or damaged, and go on; and what is refused before anything is changed."""

import json
import signal
import time

import numpy as np
import pytest
import torch

import kronfac_experiments.train as train_module
from kronfac_experiments import run_directory
from kronfac_experiments.files import write_atomically
from kronfac_experiments.train import Interrupts
from tests.experiments.runs import (
    assert_same_run,
    checkpoint,
    kronfac,
    rows,
    start_process,
    train,
    write_cases,
)


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
    options = ("--run-dir", run, "--checkpoint-every", 0.1, *words)
    return start_process(*command, *options, folder=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number, data, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "a stopped run"
    limit = ("--iterations", 10**6)
    process = launch(data, stopped, tmp_path, "--optimizer", "nag", *limit)
    wait_for_rows(stopped, 30, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
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
    [
        "--optimizer kfac",
        "--inverse block_tridiagonal --preset paper --batch paper --average 20",
        "--optimizer nag --average 7",
        "--optimizer adamw",
    ],
)
def test_a_run_in_pieces_equals_the_run_in_one(words, data, tmp_path):
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(data, whole, *words.split(), "--iterations", 30) == 0
    assert train(data, pieces, *words.split(), "--iterations", 10) == 0
    torch.manual_seed(123)  # nothing depends on what the process did in between
    assert kronfac("train", "--resume", pieces, "--iterations", 30) == 0
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
    del written["config"]["kfac"]
    (run / "config.json").write_text(json.dumps(written))
    assert kronfac("train", "--resume", run) == 2
    assert "config.json is not one of kronfac train: KeyError('kfac')" in capsys.readouterr().err


# --- a folder belongs to one process -------------------------------------------------


def contents(run):
    return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}


def only_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_folder_in_which_a_run_goes_on_cannot_be_resumed_by_another_process(
    data, tmp_path, capsys
):
    run = tmp_path / "run"
    process = launch(data, run, tmp_path, "--iterations", 10**6)
    wait_for_rows(run, 2, process)
    assert kronfac("train", "--resume", run, "--iterations", 2) == 2
    assert f"Another process is training in {run}" in only_line(capsys)
    assert process.poll() is None
    process.kill()
    process.communicate()
    further = checkpoint(run)["iteration"] + 2
    assert kronfac("train", "--resume", run, "--iterations", further) == 0, "no lock is left behind"
    assert [row["iteration"] for row in rows(run)] == list(range(further + 1))


def test_of_two_new_runs_in_one_folder_one_is_refused(data, tmp_path, capsys, monkeypatch):
    """Both find the folder empty while they load their data."""
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 3) == 0
    before = contents(run)
    real, calls = run_directory.check_new, []

    def check_late(path):
        calls.append(path)
        if len(calls) > 1:
            real(path)

    monkeypatch.setattr(run_directory, "check_new", check_late)
    assert train(data, run, "--seed", 1, "--iterations", 3) == 2
    assert f"{run} is there already" in only_line(capsys)
    assert contents(run) == before


def test_a_run_is_resumable_from_its_first_iteration_on(data, tmp_path, monkeypatch):
    """Killed long before `--checkpoint-every` seconds have passed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(data, whole, "--iterations", 6) == 0

    def kill(session):
        if session.iteration == 4:
            raise SystemExit(-signal.SIGKILL)
        return step(session)

    step = train_module.step_or_explain
    monkeypatch.setattr(train_module, "step_or_explain", kill)
    assert train(data, killed, "--iterations", 6) == -signal.SIGKILL
    assert len(rows(killed)) == 5
    monkeypatch.undo()
    assert kronfac("train", "--resume", killed) == 0
    assert_same_run(whole, killed)


def test_an_interrupted_start_leaves_nothing_in_the_way_of_the_next_one(data, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / ".config.json.unfinished").touch()
    assert kronfac("train", "--resume", run) == 2
    assert "start it again without --resume" in only_line(capsys)
    assert train(data, run, "--iterations", 2) == 0
    assert not list(run.glob(".*"))


# --- damage --------------------------------------------------------------------------

DAMAGES = {
    "lost": (lambda run: (run / "checkpoint.pt").unlink(), "has metrics but no checkpoint"),
    "cut": (lambda run: cut(run / "checkpoint.pt", 1000), "checkpoint.pt is damaged"),
    "empty": (lambda run: cut(run / "checkpoint.pt", 0), "checkpoint.pt is damaged"),
    "code in it": (
        lambda run: torch.save({"do": np.savez}, run / "checkpoint.pt"),
        "checkpoint.pt is damaged",
    ),
    "another format": (
        lambda run: torch.save({"format": 1}, run / "checkpoint.pt"),
        "not a checkpoint that this kronfac can read",
    ),
    "another network": (
        lambda run: torch.save(checkpoint(run) | {"model": {}}, run / "checkpoint.pt"),
        "does not fit",
    ),
    "metrics cut": (lambda run: cut(run / "metrics.jsonl", 50), "metrics.jsonl is shorter than"),
}


def cut(file, length):
    file.write_bytes(file.read_bytes()[:length])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_refused_in_one_line_and_left_alone(damage, data, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 3) == 0
    break_, message = DAMAGES[damage]
    break_(run)
    before = contents(run)
    capsys.readouterr()
    assert kronfac("train", "--resume", run, "--iterations", 5) == 2
    assert message in only_line(capsys)
    assert contents(run) == before


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, lambda stream: stream.write(b"new"))
    assert contents(tmp_path) == {"file": b"old"}
