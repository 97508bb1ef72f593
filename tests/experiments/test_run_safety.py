"""A run directory belongs to one process, and what is wrong in it is refused before anything is changed."""

import signal
import time

import numpy as np
import pytest
import torch

import kronfac_experiments.train as train_module
from kronfac_experiments import checkpoint_files, run_directory
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


def contents(run):
    return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}


def only_line(capsys):
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def running(data, tmp_path):
    """A run in a process of its own that has written a checkpoint and goes on."""
    run = tmp_path / "run"
    words = ("train", "--data", data, "--layers", "16,8,3", "--threads", 1, "--batch", 40)
    more = ("--no-tensorboard", "--run-dir", run, "--checkpoint-every", 0, "--iterations", 10**6)
    process = start_process(*words, *more, folder=tmp_path)
    while not (run / "checkpoint.pt").is_file() or not rows_written(run):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    yield run, process
    process.kill()
    process.communicate()


def rows_written(run):
    return (run / "metrics.jsonl").read_bytes().count(b"\n") > 2


def test_a_folder_in_which_a_run_goes_on_cannot_be_resumed_by_another_process(running, capsys):
    run, process = running
    assert kronfac("train", "--resume", run, "--iterations", 2) == 2
    assert f"Another process is training in {run}" in only_line(capsys)
    assert process.poll() is None
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    # Killed between two renames, it has left the previous checkpoint alone.
    found = checkpoint_files.load(run, torch.device("cpu"), lambda state: None)
    further = found.state["iteration"] + 2
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


def test_without_a_checkpoint_a_run_is_not_resumed_and_keeps_its_metrics(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 3) == 0
    (run / "checkpoint.pt").unlink()
    (run / "checkpoint.previous.pt").unlink()
    before = contents(run)
    assert kronfac("train", "--resume", run, "--iterations", 5) == 2
    assert f"{run} has metrics but no checkpoint" in only_line(capsys)
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


def test_a_run_killed_before_it_wrote_anything_starts_again(data, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(data, whole, "--iterations", 5) == 0
    assert train(data, killed, "--iterations", 5) == 0
    (killed / "checkpoint.pt").unlink()
    (killed / "checkpoint.previous.pt").unlink()
    (killed / "reconstructions.npz").unlink()
    (killed / "metrics.jsonl").write_bytes(b"")
    assert kronfac("train", "--resume", killed) == 0
    assert_same_run(whole, killed)


def test_an_interrupted_start_leaves_nothing_in_the_way_of_the_next_one(data, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / ".config.json.unfinished").touch()
    assert train(data, run, "--iterations", 2) == 0


def test_a_checkpoint_from_before_there_were_checksums_is_continued(data, tmp_path):
    whole, old = tmp_path / "whole", tmp_path / "old"
    assert train(data, whole, "--iterations", 20) == 0
    assert train(data, old, "--iterations", 10) == 0
    torch.save({**checkpoint(old), "format": 1}, old / "checkpoint.pt")
    assert kronfac("train", "--resume", old, "--iterations", 20) == 0
    (old / "reconstructions.npz").write_bytes((whole / "reconstructions.npz").read_bytes())
    assert_same_run(whole, old)


@pytest.mark.parametrize("names", [("cases", "targets"), ("x", "y"), ("cases", "test", "labels")])
def test_arrays_that_would_be_ignored_are_refused(names, tmp_path, capsys):
    arrays = {name: np.random.default_rng(0).random((60, 16)) for name in names}
    path = write_cases(tmp_path, **arrays)
    run = tmp_path / "run"
    assert train(path, run, "--iterations", 1) == 2
    line = only_line(capsys)
    assert f"the array {names[-1]!r}" in line
    assert "an autoencoder" in line
    assert not run.exists()


def logged(run):
    """Iterations whose loss is in the events of TensorBoard, in the order of the file."""
    from tensorboard.backend.event_processing.event_accumulator import (  # noqa: PLC0415
        EventAccumulator,
    )

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return [event.step for event in events.Scalars("step/batch")]


def test_events_are_on_the_disk_before_the_checkpoint_is(data, tmp_path, monkeypatch):
    """TensorBoard's writer has a queue, which a killed run would lose."""
    run, found = tmp_path / "run", []
    step = train_module.step_or_explain

    def look(session):
        if session.iteration == 3:
            found.extend(logged(run))
        return step(session)

    monkeypatch.setattr(train_module, "step_or_explain", look)
    words = ("--tensorboard", "--checkpoint-every", 0, "--iterations", 4)
    assert train(data, run, *words) == 0
    assert found == [0, 1, 2, 3]


def test_events_after_the_first_checkpoint_are_not_there_twice(data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    step = train_module.step_or_explain

    def kill(session):
        if session.iteration == 2:
            raise SystemExit(-signal.SIGKILL)
        return step(session)

    monkeypatch.setattr(train_module, "step_or_explain", kill)
    assert train(data, run, "--tensorboard", "--iterations", 4) == -signal.SIGKILL
    monkeypatch.undo()
    assert kronfac("train", "--resume", run) == 0
    assert logged(run) == [0, 1, 2, 3, 4]
