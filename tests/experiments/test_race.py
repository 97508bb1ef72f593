"""`kronfac bench race`: times to an error, fair grids, nothing twice, absent peers that are no crash."""

import json
import math
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from kronfac_experiments.bench.race import kfac_jax_runs, peers, running, trials
from kronfac_experiments.bench.race.config import TUNING_SEED, RaceConfig
from kronfac_experiments.bench.race.contests import CONTESTS
from kronfac_experiments.bench.race.muon import Muon, orthogonalised
from kronfac_experiments.bench.race.peers import FIELD, GROWING, KFAC, KFAC_JAX, Package, Peer
from kronfac_experiments.bench.race.running import Race
from kronfac_experiments.bench.race.standings import lines_of
from kronfac_experiments.bench.race.trials import Entry, Trial, marks, run_here
from kronfac_experiments.config import PROBLEMS
from kronfac_experiments.task import regression_task
from tests.experiments.runs import kronfac

TINY = ("--problems", "friedman", "--threads", 1, "--evaluation-cases", 200, "--seeds", 1)
BRIEF = ("--seconds", 0.05, "--tune-seconds", 0.02)
CONTEST = CONTESTS["mnist"]


@pytest.fixture
def race(tmp_path):
    def run(*words, folder=tmp_path / "race"):
        return kronfac("bench", "race", *TINY, *BRIEF, "--run-dir", folder, *words)

    return run


@pytest.fixture
def few_points(monkeypatch):
    """Two points a grid: what a grid is for shows with two."""
    field = tuple(replace(peer, grid=peer.grid[:2]) for peer in FIELD)
    monkeypatch.setattr(peers, "FIELD", field)


def saved(folder):
    return json.loads((folder / "race.json").read_text())["trials"]


def trial(optimizer="nag", seed=0, rows=((0, 0, 0.0, 50.0),), phase="race", message="", **point):
    point = point or by_name(optimizer).grid[0]
    return Trial("mnist", optimizer, phase, point, seed, 100.0, [list(r) for r in rows], message)


def by_name(name):
    return next(peer for peer in FIELD if peer.name == name)


def falling(rate, steps=100):
    """50 e^(−rate t), a step and 500 cases a second."""
    return [(k, 500 * k, float(k), 50 * math.exp(-rate * k)) for k in range(steps + 1)]


def standings(found, *names):
    optimizers = tuple(names)
    config = RaceConfig(("mnist",), optimizers, seeds=3, seconds=100.0)
    return {(line.peer.name, line.target): line for line in lines_of(Race(config, found), CONTEST)}


# --- times to an error -------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7, 33])
def test_the_time_to_an_error_does_not_depend_on_when_it_was_evaluated(every):
    curve = trial(rows=falling(0.05)[::every]).curve
    expected = math.log(50 / 4) / 0.05
    assert curve.reaches("seconds", 4.0) == pytest.approx(expected, rel=1e-12)
    assert curve.reaches("cases", 4.0) == pytest.approx(500 * expected, rel=1e-12)


def test_the_table_has_medians_spread_and_ratios_seed_by_seed():
    ours = [trial("kfac", seed, falling(rate)) for seed, rate in enumerate((0.1, 0.08, 0.12))]
    theirs = [trial("nag", seed, falling(rate)) for seed, rate in enumerate((0.05, 0.08, 0.04))]
    tuned = [
        trial("nag", TUNING_SEED, falling(0.1 - k / 100), "tune", **point)
        for k, point in enumerate(by_name("nag").grid)
    ]
    lines = standings([*ours, *theirs, *tuned], "nag")
    times = sorted(math.log(12.5) / rate for rate in (0.1, 0.08, 0.12))
    assert lines["kfac", 4.0].seconds == f"{times[1]:.3g} ({times[0]:.3g} – {times[2]:.3g})"
    assert lines["nag", 4.0].faster == "2"  # of 2, 1 and 3
    assert lines["kfac", 4.0].faster == "–"


def test_who_does_not_get_there_is_said_to_stand_where_it_stands():
    ours = [trial("kfac", 0, falling(0.1))]
    theirs = [trial("nag", 0, falling(0.03))]  # 2.49 at 100 s
    tuned = [trial("nag", TUNING_SEED, falling(0.03), "tune", **p) for p in by_name("nag").grid]
    lines = standings([*ours, *theirs, *tuned], "nag")
    assert lines["nag", 2.0].seconds == "not in 100 s (stood at 2.489)"
    assert lines["nag", 2.0].faster == f"> {100 / (math.log(25) / 0.1):.2g}"
    assert standings([*theirs, *tuned, trial("kfac", 0)], "nag")["nag", 4.0].faster == (
        "K-FAC did not get there"
    )


def test_the_best_point_reached_the_target_first_or_has_the_least_error_and_did_not_fail():
    grid = by_name("adamw").grid
    rates = (0.01, 0.02, 0.2, 0.05, 0.01, 0.3)
    tried = [
        trial("adamw", TUNING_SEED, falling(rate), "tune", "diverged" if rate == 0.3 else "", **p)
        for p, rate in zip(grid, rates, strict=True)
    ]
    config = RaceConfig(("mnist",), ("adamw",))
    assert Race(config, tried).best(CONTEST, by_name("adamw")) == grid[2]
    slow = [t for t in tried if t.point in grid[:2]]
    assert Race(config, slow).best(CONTEST, by_name("adamw")) == grid[1]
    assert Race(config, tried[-1:]).best(CONTEST, by_name("adamw")) is None


def test_evaluations_are_dense_at_first_and_end_at_the_limit():
    times = marks(300.0)
    assert times[0] == pytest.approx(1.5)
    assert times[-1] == 300.0
    assert all(b <= max(a * 1.05, a + 1.5) + 1e-9 for a, b in pairwise(times))
    assert 50 < len(times) < 80


# --- the field ---------------------------------------------------------------------


def test_every_peer_has_as_many_points_and_kfac_none_to_choose():
    assert {len(peer.grid) for peer in FIELD if not peer.name.startswith("kfac-fixed")} == {1, 6}
    assert [peer.name for peer in FIELD if len(peer.grid) == 1] == ["kfac", "kfac-fixed"]
    assert set(CONTESTS) == set(PROBLEMS)
    assert TUNING_SEED not in range(10)


@pytest.mark.parametrize("shape", [(30, 80), (80, 30), (40, 40)])
def test_newton_schulz_in_float32_makes_singular_values_near_1(shape):
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    X = orthogonalised(G)
    assert X.dtype == torch.float32
    U, S, Vt = torch.linalg.svd(G.double(), full_matrices=False)
    seen = U.T @ X.double() @ Vt.T  # the same singular vectors, so this is diagonal
    assert torch.allclose(seen, seen.diagonal().diag(), atol=1e-4)
    large = 0.05 * S.norm() < S  # five steps do not lift the smallest all the way
    assert ((seen.diagonal()[large] > 0.6) & (seen.diagonal()[large] < 1.3)).all()


def test_muon_moves_matrices_by_its_rule_and_the_rest_by_adamw():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    twin = nn.Parameter(layer.bias.detach().clone())
    W, x = layer.weight.detach().clone(), torch.randn(7, 5)
    optimizer = Muon(layer.parameters(), lr=0.1, weight_decay=0.01)
    layer(x).square().mean().backward()
    g = layer.weight.grad.clone()
    twin.grad = layer.bias.grad.clone()
    optimizer.step()
    expected = W * (1 - 0.001) - 0.1 * 0.2 * math.sqrt(5) * orthogonalised(g + 0.95 * g)
    torch.testing.assert_close(layer.weight.detach(), expected)
    torch.optim.AdamW([twin], lr=0.1, weight_decay=0.01).step()
    torch.testing.assert_close(layer.bias.detach(), twin.detach())


@pytest.mark.parametrize("peer", [p for p in FIELD if p is not KFAC_JAX], ids=lambda p: p.name)
def test_each_peer_lowers_the_error(peer):
    for module in peer.package.modules if peer.package is not None else ():
        pytest.importorskip(module)
    point = peer.grid[2] if len(peer.grid) > 1 else peer.grid[0]
    entry = Entry(peer, point, 0, 1e9, 0.0, 200, 1)
    steps = iter(range(12))

    def stop_after_some(seconds):
        if next(steps) == 11:
            raise KeyboardInterrupt

    task, models = regression_task(), []
    whole = replace(task, make_model=lambda seed: models.append(task.make_model(seed)) or models[0])
    before = task.error(task.make_model(0), task.train)
    with pytest.raises(KeyboardInterrupt):
        run_here(entry, whole, stop_after_some)
    assert task.error(models[0], task.train) < before


def test_a_run_that_fails_is_a_result():
    hopeless = Peer(
        "sgd", "SGD", ({"lr": 1e30},), lambda m, p, _: torch.optim.SGD(m.parameters(), **p)
    )
    entry = Entry(hopeless, hopeless.grid[0], 0, 5.0, 0.0, 200, 1)
    rows, message = run_here(entry, regression_task(), lambda seconds: None)
    assert rows
    assert all(math.isfinite(number) for row in rows for number in row)
    assert message.startswith("Iteration")


# --- the command -------------------------------------------------------------------


@pytest.mark.usefixtures("few_points")
def test_a_small_race_ends_in_tables_and_a_page(race, tmp_path, capsys):
    output = tmp_path / "docs" / "race.md"
    assert race("--optimizers", "nag", "adamw", "lbfgs", "muon", "--output", output) == 0
    out = capsys.readouterr().out
    assert "At most" in out
    assert "Nesterov" in out
    found = saved(tmp_path / "race")
    names = {"kfac", "nag", "adamw", "lbfgs", "muon"}
    assert {t["optimizer"] for t in found if t["phase"] == "race"} == names
    assert {t["optimizer"] for t in found if t["phase"] == "tune"} == names - {"kfac"}
    assert {t["seed"] for t in found if t["phase"] == "tune"} == {TUNING_SEED}
    starts = {t["rows"][0][3] for t in found if t["phase"] == "race"}
    assert len(starts) == 1  # the same parameters
    text = output.read_text()
    assert "K-FAC faster by" in text
    assert "kronfac bench race --problems friedman" in text
    assert "lr 0.001, mu max 0.99" in text
    page = (tmp_path / "race" / "race.html").read_text()
    assert 'data-errors="friedman"' in page
    assert "http://" not in page.split("plotly.js v")[0]


@pytest.mark.usefixtures("few_points")
def test_what_has_run_is_not_run_again_and_a_stop_keeps_it(race, tmp_path, monkeypatch, capsys):
    calls = []

    def counted(entry, *rest):
        calls.append(entry)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_here(entry, *rest)

    monkeypatch.setattr(running, "run_here", counted)
    assert race("--optimizers", "adamw") == 130
    assert "Continue with the same command" in capsys.readouterr().err
    kept = saved(tmp_path / "race")
    assert len(kept) == 2
    assert race("--optimizers", "adamw") == 0
    assert saved(tmp_path / "race")[:2] == kept
    assert len(calls) == 5  # two points, the one that was stopped, and the two of the race
    assert race("--optimizers", "adamw") == 0
    assert len(calls) == 5
    assert race("--optimizers", "adamw", "--seconds", 0.06) == 2
    assert "other settings (seconds)" in capsys.readouterr().err


def test_an_absent_package_is_a_row_with_the_command(race, tmp_path, monkeypatch):
    absent = replace(by_name("soap"), package=Package(("no_such_module",), ("nothing==1",), "MIT"))
    monkeypatch.setattr(peers, "FIELD", (KFAC, absent))
    output = tmp_path / "race.md"
    assert race("--optimizers", "soap", "--output", output) == 0
    assert "| not installed: pip install nothing==1 |" in output.read_text()


def test_kfac_jax_without_an_environment_is_a_row(race, tmp_path):
    file = tmp_path / "file"
    file.touch()  # no folder can be made below
    output = tmp_path / "race.md"
    words = ("--optimizers", "kfac-jax", "--jax-env", file / "env", "--output", output)
    assert race(*words) == 0
    assert f"no environment in {file / 'env'}" in output.read_text()


def test_growing_minibatches_double_where_those_of_kfac_have():
    sizes = kfac_jax_runs.sizes_in_octaves(trials.batch_of({"batch": GROWING}), 60_000)
    assert sizes[0] == 1000
    assert sizes[-1] == 60_000
    assert sorted(set(sizes)) == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000]
    assert kfac_jax_runs.sizes_in_octaves(500, 200) == [200]


@pytest.mark.skipif("KRONFAC_JAX_ENV" not in os.environ, reason="no environment of kfac-jax")
def test_kfac_jax_starts_where_the_others_do():
    python = kfac_jax_runs.environment(Path(os.environ["KRONFAC_JAX_ENV"]), print)
    task = regression_task()
    entry = Entry(KFAC_JAX, {"lambda0": 1.0, "batch": 500}, 0, 0.2, 0.0, 200, 1)
    rows, message = kfac_jax_runs.run_elsewhere(python, entry, task, lambda seconds: None)
    assert not message
    start = task.error(task.make_model(0), task.train.first(200))
    assert rows[0][3] == pytest.approx(start, rel=1e-4)
    assert rows[-1][3] < rows[0][3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--optimizers", "adan"), "--optimizers are of kfac, kfac-fixed, nag"),
        (("--problems", "cifar"), "--problems are of curves, mnist"),
        (("--seconds", 0), "--seconds is positive"),
        (("--tune-seconds", "nan"), "--tune-seconds is positive"),
        (("--seeds", 0), "--seeds is positive"),
        (("--threads", 0), "--threads is 1 or more"),
    ],
)
def test_mistakes_are_answered_with_a_line(words, message, capsys):
    assert kronfac("bench", "race", *words) == 2
    assert message in capsys.readouterr().err


def test_help_names_the_field(capsys):
    assert kronfac("bench", "race", "--help") == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for word in ("--tune-seconds", "--jax-env", "--quick", "psgd", "singd", "kfac-jax"):
        assert word in out
