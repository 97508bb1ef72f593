"""The race: fair terms, runs that are kept and never repeated, pages from the kept runs."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from kronfac import WhitenedMomentum
from kronfac_experiments.race import command, pages, tables
from kronfac_experiments.race.contestants import (
    CONTESTANTS,
    LAST_RATE,
    TABLE,
    WARM_UP,
    contestants_named,
    rate,
)
from kronfac_experiments.race.plan import TUNING_SEED, Lane, Terms
from kronfac_experiments.race.problems import PROBLEMS, problems_named
from kronfac_experiments.race.records import Cost, Records, Run, code_of
from kronfac_experiments.race.run import MARKS, Training, run, step_costs
from kronfac_experiments.run_directory import RunError
from tests.experiments.runs import kronfac

WINE = PROBLEMS["wine"]
ADAMW, KFAC = CONTESTANTS["adamw"], CONTESTANTS["kfac"]
TERMS = Terms({"steps": 4.0}, seeds=2)


def ended(entry, loss, message=""):
    """A made-up run of an entry."""
    rows = [[0, 0, 0.0, 9.0, 9.0, 9.0], [4, 4, 1.0, loss, loss, loss]]
    terms = entry.terms
    return Run(
        entry.problem.name, entry.contestant.name, entry.settings, entry.seed, terms.budget,
        terms.schedule, terms.threads, code_of(entry.contestant), rows, message,
    )  # fmt: skip


def training(contestant=ADAMW, problem=WINE, seed=0, clock=lambda: 0.0, **changes):
    settings = contestant.points(problem, (0.0,))[0] | changes
    return Training(problem, contestant, settings, seed, "cosine", clock)


# --- contestants -------------------------------------------------------------------


def test_everyone_that_is_tuned_has_as_many_points_and_kfac_none_to_choose():
    assert {len(c.points(WINE, (0.01,))) for c in TABLE if c.grid and not c.runs_of} == {4}
    assert {len(c.points(WINE, (0.01, 0.1))) for c in TABLE if c.decays} == {8}
    assert not any(c.grid for c in TABLE if c.curvature)


def test_untuned_is_a_row_of_its_own_with_the_runs_of_the_tuned_ones_default():
    untuned, tuned = CONTESTANTS["ours-untuned"], CONTESTANTS["ours"]
    problem = PROBLEMS["cnn"]
    (point,) = untuned.points(problem, (0.3,))
    assert point in tuned.points(problem, (0.1,))
    assert untuned.recorded_as == tuned.recorded_as == "ours"
    defaults = untuned.build(problem.make_model(0), problem.loss(), problem, point).defaults
    assert defaults == WhitenedMomentum(problem.make_model(0)).defaults


def test_sgds_rates_are_for_a_loss_of_the_usual_size():
    large = replace(WINE, loss_scale=10.0)
    rates = [point["lr"] for point in CONTESTANTS["sgd"].points(large, ())]
    assert rates == pytest.approx([r / 10 for r in CONTESTANTS["sgd"].grid["lr"]])


def test_kfac_takes_the_large_mini_batches():
    problem = PROBLEMS["tabular"]
    assert ADAMW.points(problem, (0.0,))[0]["batch"] == 128
    assert KFAC.points(problem, (0.0,))[0]["batch"] == 1024


def test_rates_rise_and_fall_over_the_run():
    assert rate("constant", 0.7) == 1.0
    for schedule, last in LAST_RATE.items():
        assert rate(schedule, WARM_UP / 2) == pytest.approx(0.5)
        assert rate(schedule, WARM_UP) == pytest.approx(1.0)
        assert rate(schedule, (1 + WARM_UP) / 2) == pytest.approx((1 + last) / 2)
        assert rate(schedule, 1.0) == pytest.approx(last)


@pytest.mark.parametrize("contestant", [c for c in TABLE if c.name != "lm"], ids=lambda c: c.name)
def test_each_contestant_lowers_the_loss(contestant):
    rows, message = run(training(contestant), steps=8, seconds=None)
    assert not message
    assert rows[-1][3] < rows[0][3]


def test_levenberg_marquardt_solves_an_equation():
    rows, message = run(training(CONTESTANTS["lm"], PROBLEMS["heat"]), steps=8, seconds=None)
    assert not message
    assert rows[-1][5] < 0.1 * rows[0][5]


# --- a run -------------------------------------------------------------------------


def test_adamw_is_pytorchs_plain_loop():
    x, y = WINE.split.train.inputs, WINE.split.train.targets
    model = WINE.make_model(3)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for k in range(5):
        optimizer.param_groups[0]["lr"] = 0.01 * rate("cosine", k / 5)
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
    raced = training(seed=3, lr=0.01, weight_decay=0.1)
    run(raced, steps=5, seconds=None)
    for a, b in zip(model.parameters(), raced.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_in_everyones_objective():
    with_penalty = replace(WINE, penalty=0.5)
    raced = training(CONTESTANTS["sgd"], with_penalty, lr=1.0)
    expected = [0.5 * p.detach().clone() for p in raced.model.parameters()]
    batch = next(with_penalty.shuffled(None, 0))
    with_penalty.objective(raced.model, nn.CrossEntropyLoss(), batch).backward()
    expected = [e + p.grad for e, p in zip(expected, raced.model.parameters(), strict=True)]
    raced._closure(batch)
    for e, p in zip(expected, raced.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, e)


def test_a_run_is_evaluated_at_its_marks_and_ends_with_its_budget():
    rows, _ = run(training(), steps=40, seconds=None)
    assert [row[0] for row in rows] == sorted({-(-mark * 40 // 1) for mark in MARKS})
    ticks = iter(range(1000))
    raced = training(clock=lambda: float(next(ticks)))  # each step takes one second
    rows, _ = run(raced, steps=None, seconds=7.0)
    assert rows[-1][:3] == [7, 7 * len(WINE.split.train), 7.0]


def test_evaluation_is_in_eval_mode_and_takes_the_lower_training_loss(monkeypatch):
    raced = training()
    raced.step(0.5)
    losses = iter((2.0, 1.0))
    modes = []

    def evaluate(model, cases):
        modes.append(model is raced.model)
        return next(losses, 7.0), 8.0

    problem = raced._problem
    monkeypatch.setattr(type(problem), "_evaluate", lambda self, m, c: evaluate(m, c))
    assert raced.evaluate()[3:] == [1.0, 7.0, 8.0]
    assert modes == [True, False, False], "the average had the lower training loss"


def test_a_run_that_fails_is_a_result():
    rows, message = run(training(CONTESTANTS["sgd"], lr=1e38), steps=5, seconds=None)
    assert message.startswith("Step ")
    assert len(rows) >= 1


def test_costs_are_measured_in_turns():
    now = [0.0]
    order = []

    def trained(name, seconds):
        raced = training(clock=lambda: now[0])
        real = raced.optimizer.step

        def step(closure):
            order.append(name)
            now[0] += seconds * (3 if raced.steps == 0 else 1)
            return real(closure)

        raced.optimizer.step = step
        return raced

    costs = step_costs([trained("a", 1.0), trained("b", 0.5)], limit=1e9)
    assert costs == [(pytest.approx(2.0), pytest.approx(1.0)), (1.0, 0.5)]
    assert order[20:80] == ["b"] * 20 + ["a"] * 20 + ["b"] * 20
    cost = Cost("wine", "adamw", None, 1, "", 2.0, 0.5)
    assert cost.steps_in(10.0) == 16
    assert cost.steps_in(1.0) == 1


# --- the plan ----------------------------------------------------------------------


def test_tuning_comes_first_and_the_best_point_races(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    lane = Lane(WINE, ADAMW, TERMS, records)
    assert (len(lane.missing), lane.runs_left, lane.settings) == (4, 6, None)
    assert {entry.seed for entry in lane.missing} == {TUNING_SEED}
    for entry, loss in zip(lane.missing, (3.0, 1.0, 0.5, 2.0), strict=True):
        records.append(ended(entry, loss, message="diverged" if loss == 0.5 else ""))
    assert lane.settings["lr"] == 0.003
    assert not lane.on_the_edge
    assert [(e.seed, e.settings["lr"]) for e in lane.missing] == [(0, 0.003), (1, 0.003)]
    records.append(ended(lane.missing[0], 1.0))
    assert [run.seed for run in lane.runs] == [0]
    assert lane.runs_left == 1


def test_other_mini_batches_and_constants_are_tried_at_the_best_point(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    lane = Lane(PROBLEMS["tabular"], ADAMW, replace(TERMS, tune_fully=True), records)
    assert lane.runs_left == 4 + 3 + 2
    for entry in lane.missing:
        records.append(ended(entry, 0.01 / entry.settings["lr"]))
    tried = [(e.settings["batch"], e.settings.get("beta2")) for e in lane.missing]
    assert tried == [(128, 0.95), (1024, None), (1024, 0.95)], "128 has run"
    assert {e.settings["lr"] for e in lane.missing} == {0.03}
    for entry in lane.missing:
        records.append(ended(entry, 0.1 if entry.settings.get("beta2") else 0.5))
    assert (lane.settings["batch"], lane.settings["beta2"]) == (128, 0.95)
    assert lane.on_the_edge
    assert lane.runs_left == 2


def test_who_fails_at_every_point_does_not_race(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    lane = Lane(WINE, ADAMW, TERMS, records)
    for entry in lane.missing:
        records.append(ended(entry, 1.0, message="diverged"))
    assert (lane.settings, lane.missing, lane.runs_left, lane.runs) == (None, [], 0, [])


def test_runs_of_other_code_count_only_if_that_is_wanted(tmp_path):
    records = Records(tmp_path / "runs.jsonl")
    lane, any_lane = (Lane(WINE, KFAC, replace(TERMS, any_code=c), records) for c in (False, True))
    older, old = (replace(ended(lane.missing[0], 1.0), code=code) for code in ("older", "old"))
    for run_of_the_past in (old, older, old):
        records.append(run_of_the_past)
    assert lane.runs == []
    assert any_lane.runs == [old], "the newest"
    assert code_of(KFAC).startswith("kronfac ")
    assert code_of(ADAMW).startswith("torch ")


# --- records -----------------------------------------------------------------------


def test_what_was_kept_is_there_again_and_an_unfinished_line_is_dropped(tmp_path):
    path = tmp_path / "folder" / "runs.jsonl"
    records = Records(path)
    lane = Lane(WINE, KFAC, TERMS, records)
    one, other = (ended(entry, 1.0) for entry in lane.missing)
    cost = Cost("wine", "kfac", None, 1, "code", 1.0, 2.0)
    records.append(one)
    records.append(cost)
    with path.open("a") as stream:
        stream.write('{"problem": "wi')
    again = Records(path)
    assert list(again) == [one]
    assert again.find(cost.key, "code") == cost
    assert again.find(one.key, "other code") is None
    again.append(other)
    records.read()
    assert list(records) == [one, other], "another process may have appended it"
    assert list(Records(path)) == [one, other]
    path.write_text("damaged\n" + path.read_text())
    with pytest.raises(RunError, match="Line 1 of"):
        Records(path)


def test_a_problem_is_run_by_one_process_at_a_time(tmp_path):
    one, other = (Records(tmp_path / "runs.jsonl") for _ in range(2))
    with one.claimed("wine") as first, other.claimed("wine") as second:
        assert (first, second) == (True, False)
        with other.claimed("iris") as third:
            assert third
    with other.claimed("wine") as again:
        assert again


# --- the command -------------------------------------------------------------------

SMALL = ("race", "wine", "--contestants", "kfac", "adamw", "--seeds", 1)


def test_a_race_is_run_once_and_goes_on_after_ctrl_c(tmp_path, monkeypatch, capsys):
    words = (*SMALL, "--steps", 4, "--runs", tmp_path)
    real, count = command.run_entry, []

    def interrupted(lane, entry, tick):
        count.append(entry)
        if len(count) == 3:
            raise KeyboardInterrupt
        return real(lane, entry, tick)

    monkeypatch.setattr(command, "run_entry", interrupted)
    assert kronfac(*words) == 130
    assert "Continue with the same command" in capsys.readouterr().err
    path = tmp_path / "small.jsonl"
    assert len(path.read_text().splitlines()) == 2
    assert kronfac(*words) == 0
    assert "4 runs of 4 steps are left" in capsys.readouterr().out
    lines = path.read_text()
    assert len(lines.splitlines()) == 6
    assert kronfac(*words) == 0
    assert "All runs are there already" in capsys.readouterr().out
    assert path.read_text() == lines
    first = json.loads(lines.splitlines()[0])
    assert first["contestant"] == "kfac"
    assert first["state_bytes"] > 0
    assert len(first["rows"]) > 3


def test_equal_seconds_become_steps_by_the_measured_cost(tmp_path):
    assert kronfac(*SMALL, "--seconds", 0.2, "--runs", tmp_path) == 0
    records = Records(tmp_path / "small.jsonl")
    lines = list(map(json.loads, records.path.read_text().splitlines()))
    costs = {line["contestant"]: Cost(**line) for line in lines if "step" in line}
    assert set(costs) == {"kfac", "adamw"}
    for record in records:
        assert record.rows[-1][0] == costs[record.contestant].steps_in(0.2)


def test_what_another_process_runs_is_left_to_it(tmp_path, capsys):
    with Records(tmp_path / "small.jsonl").claimed("wine"):
        assert kronfac(*SMALL, "--steps", 4, "--runs", tmp_path) == 0
    assert "Left to other processes, which are running them: wine." in capsys.readouterr().out
    assert not (tmp_path / "small.jsonl").exists()


def test_a_page_is_rendered_from_the_runs_and_says_how_many_hours_are_missing(
    tmp_path, monkeypatch, capsys
):
    terms = Terms({"seconds": 0.1}, seeds=2, weight_decays=(0.0,), schedule="linear")
    page = pages.ResultPage("Wine", ("wine",), ("kfac", "adamw"), terms, ("wine",))
    monkeypatch.setitem(pages.PAGES, "wine", page)
    output = tmp_path / "wine.md"
    words = ("results", "wine", "--runs", tmp_path, "--output", output)
    assert kronfac(*words) == 2
    assert "No runs of this race are in" in capsys.readouterr().err
    assert kronfac(*words, "--run") == 0
    assert "8 runs are missing: 0.0 hours" in capsys.readouterr().out
    text = output.read_text()
    assert "| wine | " in text
    assert "Made by `kronfac results wine`" in text
    assert code_of(KFAC) in text
    # PyTorch's AdamW keeps two numbers for each weight, and a count of steps for each parameter.
    (state,) = re.findall(r"\| wine \| [^|]+ \| (2\.\d+) \|", text)
    assert float(state) == pytest.approx(2, abs=0.05)
    for name in ("wine.png", "wine_1.png", "wine_2.png", "wine_3.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    output.write_text(text.replace("## The contestants", "## What it shows\n\nWords.\n\n## The"))
    assert kronfac(*words) == 0
    assert "Words." in output.read_text(), "what people write stays"


@pytest.fixture
def made_up_race(tmp_path):
    """Writes a race of kronfac's optimizer, with and without A, with AdamW; losses by problem."""
    records = Records(tmp_path / "runs.jsonl")
    terms = Terms({"steps": 4.0}, seeds=3, weight_decays=(0.0,))

    def make(**losses):
        race = {}
        for name, of_problem in losses.items():
            contestants = [CONTESTANTS[c] for c in ("adamw", "ours", "ours-without-a")]
            race[name] = [Lane(PROBLEMS[name], c, terms, records) for c in contestants]
            for lane, of_lane in zip(race[name], of_problem, strict=True):
                while of_lane and lane.missing:
                    entry = lane.missing[0]
                    records.append(ended(entry, of_lane[entry.seed % TUNING_SEED]))
        return race

    return make


ALONE = 1.0, 1.0, 1.0
COMPARED = {
    "ahead": ((0.97, 0.98, 0.99), "**0.980**", (1, 0, 0)),
    "level within 1 %": ((1.009, 1.009, 1.009), "1.009 =", (0, 1, 0)),
    "level within the noise": ((1.0, 1.02, 1.1), "1.020 =", (0, 1, 0)),
    "behind": ((1.02, 1.03, 1.04), "1.030", (0, 0, 1)),
}


@pytest.mark.parametrize("case", COMPARED)
def test_level_is_within_one_per_cent_or_two_standard_errors(case, made_up_race):
    ours, shown, counts = COMPARED[case]
    race = made_up_race(wine=(ALONE, ours, ALONE), iris=(ALONE, (), ()))
    page = {table.heading: table for table in tables.details(race, chose=["iris"])}
    assert page["Loss over the best peer's"].rows == [("wine", "judge", "AdamW", shown, "1.000 =")]
    row = page["Beside the best peer"].rows[1]
    assert row[:-1] == ("WhitenedMomentum", "all", "1", *map(str, counts))
    (row,) = page["What A is worth"].rows
    assert float(row[3]) == pytest.approx(100 * (1 - sorted(ours)[1]))


def test_problems_that_are_not_finished_are_named(made_up_race):
    table = tables.scores(made_up_race(wine=(ALONE,) * 3, iris=(ALONE, (), ()), cancer=((),) * 3))
    assert [row[1:] for row in table.rows] == [
        ("**1.00** !",) * 3, ("1.00 !", "–", "–"), ("–", "–", "–"),
    ]  # fmt: skip
    assert "Not finished: iris (14 runs are left), cancer (21 runs are left)." in table.note
    assert "wine" not in table.note


def test_the_everyday_page_has_a_row_for_every_network_and_optimizer():
    page = pages.PAGES["everyday"]
    names = [problem.name for problem in problems_named(page.problems)]
    assert set(page.chose) < set(names)
    assert sorted(set(names) - set(page.chose)) == ["gru", "tied_gpt", "unet", "vit"]
    assert {"adamw", "muon", "soap", "ours", "ours-untuned", "ours-without-a"} == {
        *page.contestants
    }
    assert page.contestants[0] == "adamw", "step costs are in units of its own"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("race", "Name problems, or groups of them: networks"),
        ("race cats", "PROBLEM is one of the groups"),
        ("race wine --contestants nobody", "--contestants are of kfac"),
        ("race wine --seconds 0", "--seconds is positive"),
        ("race wine --seconds 1 --steps 1", "not both"),
        ("race wine --steps 0", "--steps is 1 or more"),
        ("race wine --seeds 101", "--seeds is at most 100"),
        ("race wine --weight-decay -1", "--weight-decay is 0 or more"),
        ("results cats", "NAME is one of everyday"),
    ],
)
def test_mistakes_are_answered_with_a_line(words, message, capsys):
    assert kronfac(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_contestants_come_in_the_order_of_the_table():
    assert [c.name for c in contestants_named(("soap", "kfac"))] == ["kfac", "soap"]
