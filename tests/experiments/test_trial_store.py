import json
from dataclasses import dataclass

import pytest

from kronfac_experiments.run_directory import RunError
from kronfac_experiments.train import TrainingInterruptedError
from kronfac_experiments.trial_store import TrialStore


@dataclass(frozen=True)
class Trial:
    name: str
    value: float | None


def store(path, order=None, **settings):
    return TrialStore(path, settings, Trial, key=lambda trial: trial.name, order=order)


def test_what_was_kept_is_there_again(tmp_path):
    path = tmp_path / "folder" / "trials.json"
    first = store(path, seconds=3.0)
    assert not first
    assert not path.parent.exists(), "nothing is written before the first trial"
    first.keep(Trial("a", 1.0))
    first.keep(Trial("b", None), Trial("c", 2.5))
    again = store(path, seconds=3.0)
    assert dict(again) == dict(first) == {t.name: t for t in again.values()}
    assert list(again) == ["a", "b", "c"]
    assert "b" in again
    assert "d" not in again


def test_a_later_trial_takes_the_place_of_the_one_with_its_key(tmp_path):
    path = tmp_path / "trials.json"
    trials = store(path, order=lambda trial: trial.value)
    trials.keep(Trial("a", 2.0))
    trials.keep(Trial("b", 1.0))
    trials.keep(Trial("a", 0.5))
    written = json.loads(path.read_text())
    assert written["trials"] == [{"name": "a", "value": 0.5}, {"name": "b", "value": 1.0}]
    assert written.keys() == {"settings", "trials", "versions", "machine"}


def test_trials_of_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "trials.json"
    store(path, seconds=3.0, threads=1).keep(Trial("a", 1.0))
    with pytest.raises(RunError, match=r"other settings \(seconds\)"):
        store(path, seconds=4.0, threads=1)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"settings": {}, "trials": 1}', '{"settings": {}, "trials": [{"other": 1}]}'],
)
def test_a_damaged_file_is_refused_and_left_as_it_is(content, tmp_path):
    path = tmp_path / "trials.json"
    path.write_text(content)
    with pytest.raises(RunError, match=r"trials\.json is damaged"):
        store(path)
    assert path.read_text() == content


def test_an_interrupted_trial_is_lost_and_the_others_are_named(tmp_path):
    path = tmp_path / "trials.json"
    trials = store(path)
    trials.keep(Trial("a", 1.0))
    with pytest.raises(TrainingInterruptedError, match=str(path)) as stop, trials.interruptible():
        raise KeyboardInterrupt
    assert stop.value.exit_code == 130
    assert list(store(path)) == ["a"]
