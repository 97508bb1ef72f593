"""A checkpoint that is damaged is not used: the one before it is, with a warning, to the same end."""

import hashlib
import io
import shutil
from collections import OrderedDict

import numpy as np
import pytest
import torch

import kronfac_experiments.train as train_module
from kronfac_experiments import checkpoint_files
from kronfac_experiments.checkpoint import FORMAT, MARK, CheckpointError, decode, encode
from kronfac_experiments.evaluation import best_error
from tests.experiments.runs import assert_same_run, checkpoint, kronfac, rows, train, write_cases

LAST = 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 12 iterations, and one that stopped after 8 and has checkpoints of 7 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_cases(folder)
    assert train(data, folder / "whole", "--iterations", LAST) == 0
    assert train(data, folder / "stopped", "--iterations", 8, "--checkpoint-every", 0) == 0
    return folder


@pytest.fixture
def run(runs, tmp_path, capsys):
    shutil.copytree(runs / "stopped", tmp_path / "run")
    capsys.readouterr()
    return tmp_path / "run"


def contents(run):
    return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}


def resume(run):
    return kronfac("train", "--resume", run, "--iterations", LAST)


def summed(content):
    return content + MARK + hashlib.sha256(content).hexdigest().encode()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def flip(content, where):
    at = round(where * (len(content) - 1))
    return content[:at] + bytes([content[at] ^ 0b100]) + content[at + 1 :]


CUTS = (0, 1, 100, 0.1, 0.5, 0.9, -500, -80, -79, -78, -1)
DAMAGES = {
    **{f"cut at {n}": lambda c, n=n: c[: int(n * len(c)) if 0 < n < 1 else n] for n in CUTS},
    **{f"flipped at {w:.2f}": lambda c, w=w: flip(c, w) for w in np.linspace(0, 1, 9)},
    "overwritten with zeros": lambda c: bytes(len(c)),
    "zeros at the end": lambda c: c[:-4096] + bytes(4096),
    "no checkpoint": lambda c: b"no",
    "something behind it": lambda c: c + b"\n",
    "twice": lambda c: c + c[:-1],
    "a list": lambda c: summed(saved([1, 2])),
    "no format": lambda c: summed(saved({"iteration": 3})),
    "a strange format": lambda c: summed(saved({"format": "2", "iteration": 3})),
    "code in it": lambda c: summed(saved({"format": FORMAT, "do": shutil.rmtree})),
    "another state": lambda c: encode({"iteration": 3}),
    "a negative length": lambda c: encode({"iteration": 3, "metrics_bytes": -1}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_is_used(damage, runs, run, capsys):
    file = run / "checkpoint.pt"
    damaged = DAMAGES[damage](file.read_bytes())
    file.write_bytes(damaged)
    assert resume(run) == 0
    said = capsys.readouterr().out
    assert f"Warning: {file} is " in said
    assert "The run goes on from the checkpoint before it, checkpoint.previous.pt." in said
    assert "from iteration 7" in said
    assert_same_run(runs / "whole", run)
    assert (run / "checkpoint.damaged.pt").read_bytes() == damaged


def test_the_checkpoint_before_a_missing_one_is_used(runs, run, capsys):
    (run / "checkpoint.pt").unlink()
    assert resume(run) == 0
    said = capsys.readouterr().out
    assert f"Warning: {run / 'checkpoint.pt'} is missing. The run goes on" in said
    assert_same_run(runs / "whole", run)


def test_the_checkpoint_before_one_that_can_not_be_read_is_used(runs, run, capsys):
    (run / "checkpoint.pt").unlink()
    (run / "checkpoint.pt").mkdir()
    assert resume(run) == 0
    assert "can't be read: Is a directory" in capsys.readouterr().out
    assert_same_run(runs / "whole", run)


def test_a_damaged_checkpoint_before_the_newest_is_not_looked_at(run, capsys):
    (run / "checkpoint.previous.pt").write_bytes(b"")
    assert resume(run) == 0
    said = capsys.readouterr().out
    assert "Warning" not in said
    assert "from iteration 8" in said


@pytest.mark.parametrize("damage", ["cut at 0", "cut at 0.5", "flipped at 0.50", "code in it"])
@pytest.mark.parametrize("before", ["the same", "missing"])
def test_without_a_whole_checkpoint_the_run_is_refused_and_left_alone(damage, before, run, capsys):
    file, previous = run / "checkpoint.pt", run / "checkpoint.previous.pt"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    if before == "missing":
        previous.unlink()
    else:
        previous.write_bytes(DAMAGES[damage](previous.read_bytes()))
    was = contents(run)
    assert resume(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "There is nothing to resume from" in line
    assert f"{file} is damaged" in line
    assert f"{previous} is {'missing' if before == 'missing' else 'damaged'}" in line
    assert contents(run) == was


def test_a_checkpoint_of_a_newer_kronfac_is_refused_and_left_alone(run, capsys):
    """It is whole: to go on from the one before would lose it."""
    file = run / "checkpoint.pt"
    file.write_bytes(summed(saved({**checkpoint(run), "format": FORMAT + 1})))
    was = contents(run)
    assert resume(run) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} has format {FORMAT + 1}, and this kronfac reads formats up to {FORMAT}" in line
    assert contents(run) == was


def test_the_checkpoint_that_goes_with_the_metrics_is_used(runs, run, capsys):
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-1])
    assert resume(run) == 0
    assert (
        "metrics.jsonl is shorter than when the checkpoint was written" in capsys.readouterr().out
    )
    assert_same_run(runs / "whole", run)


def test_lost_metrics_are_refused(run, capsys):
    (run / "metrics.jsonl").unlink()
    assert resume(run) == 2
    assert "shorter than when the checkpoint was written" in capsys.readouterr().err


def test_damaged_pictures_are_said_and_do_not_stop_a_run(runs, run, capsys):
    pictures = run / "reconstructions.npz"
    pictures.write_bytes(pictures.read_bytes()[:200])
    assert resume(run) == 0
    assert f"Warning: {pictures} is damaged" in capsys.readouterr().out
    assert checkpoint(run)["iteration"] == LAST
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in rows(runs / "whole")]


def test_pictures_of_iterations_that_are_made_again_do_not_come_back(run, monkeypatch):
    """The checkpoint of iteration 8 is lost, its picture is not; then the run is killed again."""
    (run / "checkpoint.pt").unlink()
    step = train_module.step_or_explain

    def kill(session):
        if session.iteration == 9:
            raise SystemExit(1)
        return step(session)

    monkeypatch.setattr(train_module, "step_or_explain", kill)
    assert resume(run) == 1
    with np.load(run / "reconstructions.npz") as pictures:
        assert pictures["iterations"].tolist() == [0]


def test_what_an_unfinished_write_left_is_removed(run):
    for name in (".checkpoint.pt.unfinished", ".diverged.json.unfinished"):
        (run / name).write_bytes(b"half of")
    assert resume(run) == 0
    assert not list(run.glob(".*"))


def test_a_folder_without_configuration_says_how_to_go_on(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    assert resume(run) == 2
    assert "start it again without --resume" in capsys.readouterr().err


def test_a_full_disk_leaves_the_checkpoints_as_they_were(run, monkeypatch):
    was = contents(run)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint_files.save(run, {"iteration": 9})
    assert contents(run) == was


def test_too_little_memory_is_not_taken_for_damage(monkeypatch):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    content = encode({"iteration": 1})
    monkeypatch.setattr(torch, "load", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        decode(content, CPU)


def test_random_bytes_are_refused_by_name():
    chance = np.random.default_rng(0)
    whole = encode({"weights": torch.arange(100.0), "names": OrderedDict(a=1)})
    for k in range(200):
        noise = chance.integers(0, 256, size=int(chance.integers(0, 60)), dtype=np.uint8).tobytes()
        at, upto = sorted(chance.integers(0, len(whole), size=2).tolist())
        spoilt = (noise, whole[:at] + noise + whole[upto:], whole[:at] + noise)[k % 3]
        if spoilt != whole:
            with pytest.raises(CheckpointError, match=r"is damaged|can read"):
                decode(spoilt, CPU)


def test_an_error_that_was_not_finite_is_no_error_that_was_reached():
    """A checkpoint keeps finite errors only."""
    assert best_error({"test_error": 0.1}) == float("inf")
