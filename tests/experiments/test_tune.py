import json

import pytest

from tests.experiments.runs import checkpoint, kronfac, write_cases


@pytest.fixture
def tuning(tmp_path):
    """Calls `kronfac tune` on tiny data."""
    data = write_cases(tmp_path)
    folder = tmp_path / "tuning"

    def tune(*words):
        options = ("--layers", "16,8,3", "--threads", 1, "--batch", 40, "--run-dir", folder)
        return kronfac("tune", "--data", data, *options, *words)

    return tune, folder


def result(folder):
    return json.loads((folder / "tune.json").read_text())


def test_the_grid_is_run_and_the_best_named(tuning, capsys):
    tune, folder = tuning
    grid = ("--lr", 0.01, 1e30, "--mu-max", 0.9, 0.99, "--seconds", 0.05)
    assert tune(*grid) == 0
    content = result(folder)
    assert {(t["lr"], t["mu_max"]) for t in content["trials"]} == {
        (lr, mu) for lr in (0.01, 1e30) for mu in (0.9, 0.99)
    }
    errors = [trial["error"] for trial in content["trials"]]
    assert errors[0] == min(errors[:2]) == content["trials"][0]["error"]
    assert errors[2:] == [None, None]  # diverged, and last
    best = content["trials"][0]
    out = capsys.readouterr().out
    assert f"--optimizer nag --lr 0.01 --mu-max {best['mu_max']:g}" in out
    assert "diverged" in out
    assert f"Wrote {folder / 'tune.json'}" in out
    for trial in content["trials"][:2]:
        assert trial["seconds"] >= 0.05


def test_what_has_run_is_not_run_again(tuning):
    tune, folder = tuning
    grid = ("--optimizer", "adamw", "--lr", 0.001, 0.01, "--seconds", 0.05)
    assert tune(*grid) == 0
    first = result(folder)
    assert tune(*grid) == 0
    assert result(folder)["trials"] == first["trials"]
    # Killed after the run ended and before it was noted: read, not run.
    lost = first["trials"].pop()
    (folder / "tune.json").write_text(json.dumps(first))
    assert tune(*grid) == 0
    assert lost in result(folder)["trials"]


def test_more_rounds_let_the_better_half_go_on(tuning):
    tune, folder = tuning
    grid = ("--optimizer", "adamw", "--lr", 0.0001, 0.001, 0.01, "--seconds", 0.05)
    assert tune(*grid) == 0
    before = {trial["lr"]: trial["iterations"] for trial in result(folder)["trials"]}
    assert tune(*grid, "--rounds", 3) == 0
    trials = result(folder)["trials"]
    assert [trial["limit"] for trial in trials] == [0.2, 0.1, 0.05]
    assert trials[-1]["iterations"] == before[trials[-1]["lr"]]
    for trial in trials[:2]:
        assert trial["iterations"] >= before[trial["lr"]]
        assert trial["seconds"] >= trial["limit"]
        run = folder / f"lr{trial['lr']:g}"
        assert checkpoint(run)["iteration"] == trial["iterations"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--optimizer", "kfac"), "kfac has no learning rate to tune"),
        (("--optimizer", "adamw", "--mu-max", 0.9), "--mu-max is for nag"),
        (("--seconds", 0), "--seconds is positive"),
        (("--rounds", 0), "--rounds is 1 or more"),
        (("--optimizer", "foo"), "--optimizer is kfac, nag or one of"),
    ],
)
def test_mistakes(words, message, tuning, capsys):
    tune, folder = tuning
    assert tune(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not folder.exists()


def test_other_settings_in_the_same_folder_are_refused(tuning, capsys):
    tune, _ = tuning
    assert tune("--lr", 0.01, "--mu-max", 0.9, "--seconds", 0.02) == 0
    assert tune("--lr", 0.01, "--mu-max", 0.9, "--seconds", 0.03) == 2
    assert "other settings" in capsys.readouterr().err


def test_a_grid_that_diverges_everywhere_fails(tuning, capsys):
    tune, _ = tuning
    assert tune("--lr", 1e30, "--mu-max", 0.9, "--seconds", 0.05) == 1
    assert "Every point of the grid diverged" in capsys.readouterr().err
