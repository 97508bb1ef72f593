"""States that earlier versions saved: they load, and training goes on as it did then."""

import math

import pytest
import torch

from tests.optimizer.saved_states.runs import (
    CONTINUED,
    FOLDER,
    RUNS,
    advance,
    optimizer_of,
    parameters,
)

FILES = sorted(path.stem for path in FOLDER.glob("v*.pt"))


def _content(file: str):
    return torch.load(FOLDER / f"{file}.pt", weights_only=True)


def test_every_run_is_there():
    assert {f"v6_{name}" for name in RUNS} <= set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_saved_state_continues_as_when_it_was_saved(file):
    saved, name = _content(file), file.partition("_")[2]
    optimizer, run = optimizer_of(name), RUNS[name]
    optimizer.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    losses = advance(optimizer, name, run.steps + 1, run.steps + CONTINUED)
    assert losses == pytest.approx(saved["losses"], rel=1e-8)
    for parameter, value in parameters(optimizer).items():
        torch.testing.assert_close(value, saved["parameters"][parameter], rtol=1e-8, atol=1e-8)


def test_the_files_of_version_6_hold_what_their_names_say():
    kfac = {name: _content(f"v6_{name}")["optimizer"]["kfac"] for name in RUNS}
    assert {state["version"] for state in kfac.values()} == {6}
    assert math.isnan(kfac["before_its_first_step"]["lambda_"])
    for name in ("default_block_diagonal", "default_block_tridiagonal", "averaged_iterate"):
        assert kfac[name]["last"]["kept"] is not None
    assert kfac["between_validations"]["last"] is not None
    assert kfac["between_validations"]["last"]["kept"] is None
    for name in ("pending_refresh", "pending_refresh_tridiagonal"):
        assert kfac[name]["refresh"] is not None
    assert kfac["averaged_iterate"]["average"] is not None
    assert kfac["averaged_iterate"]["remembered"] is not None
    assert math.isfinite(kfac["averaged_iterate"]["memory"])
    assert kfac["low_rank"]["decayed"] is not None
