"""`kronfac bench ordinary`: a plain loop, and a comparison that follows from its runs."""

import itertools
import json
import math
import re

import pytest
import torch
from torch import nn

from kronfac import KronfacError
from kronfac_experiments.bench.ordinary.config import LEARNING_RATES, TUNING_SEED
from kronfac_experiments.bench.ordinary.problems import PROBLEMS
from kronfac_experiments.bench.ordinary.run import (
    MARKS,
    Run,
    adamw,
    kfac,
    run_one,
    run_side_by_side,
    shuffled_batches,
)
from kronfac_experiments.bench.ordinary.score import FLOOR, lines_of, summary
from kronfac_experiments.bench.ordinary.trials import ADAMW_NAME, KFAC_NAME, Trial
from kronfac_experiments.task import Cases
from tests.experiments.runs import kronfac

# ---------------------------------------------------------------------------------------------- run


def test_an_epoch_has_every_case_once_and_a_last_smaller_mini_batch():
    cases = Cases(torch.arange(10.0)[:, None], torch.arange(10))
    batches = list(itertools.islice(shuffled_batches(cases, 4, seed=0), 6))
    assert [len(x) for x, _ in batches] == [4, 4, 2, 4, 4, 2]
    epochs = [torch.cat([y for _, y in batches[k : k + 3]]) for k in (0, 3)]
    for epoch in epochs:
        assert epoch.sort().values.tolist() == list(range(10))
    assert not torch.equal(*epochs)
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    again = list(itertools.islice(shuffled_batches(cases, 4, seed=0), 6))
    assert all(torch.equal(x, z) for (x, _), (z, _) in zip(batches, again, strict=True))


@pytest.mark.parametrize("make", [kfac(), adamw(1e-2)], ids=["kfac", "adamw"])
def test_a_run_trains_and_is_evaluated_at_every_mark(make):
    record = run_one(PROBLEMS["wine"], make, seed=0, seconds=0.1)
    assert len(record.train_loss) == len(record.validation_error) == len(MARKS)
    assert record.last < record.first
    assert record.first == PROBLEMS["wine"].training_loss(PROBLEMS["wine"].make_model(0))
    assert record.seconds >= 0.1
    assert record.steps >= 1


def test_adamw_is_pytorchs_plain_loop():
    problem, seed = PROBLEMS["iris"], 3
    run = Run(problem, adamw(1e-2), seed, seconds=0.03)
    run.advance(0.03)
    model = problem.make_model(seed)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    batches = shuffled_batches(problem.split.train, 32, seed)
    for x, y in itertools.islice(batches, run.record.steps):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    assert torch.equal(model[0].weight, run.model[0].weight)


def test_runs_side_by_side_take_the_same_time_from_the_same_start():
    records = run_side_by_side(PROBLEMS["linnerud"], [kfac(), adamw(1e-3)], seed=1, seconds=0.05)
    assert records[0].first == records[1].first
    assert all(record.seconds >= 0.05 for record in records)
    assert all(len(record.train_loss) == len(MARKS) for record in records)


class Acting:
    """Does something to the model instead of training it."""

    def __init__(self, act):
        self.act, self.steps = act, 0

    def step(self, x, y):
        self.steps += 1
        self.act(self.steps)


def test_a_run_that_fails_ends_and_says_why():
    def spoil(model):
        with torch.no_grad():
            model[0].weight.fill_(math.nan)

    def give_up(steps):
        if steps > 5:  # more than the warm-up takes
            raise KronfacError("no more")

    makes = {
        "became nan": lambda model, loss: Acting(lambda steps: spoil(model)),
        "no more": lambda model, loss: Acting(give_up),
    }
    for failure, make in makes.items():
        record = run_one(PROBLEMS["wine"], make, seed=0, seconds=1.0)
        assert failure in record.failure
        assert len(record.train_loss) < len(MARKS)
        trial = Trial.of(PROBLEMS["wine"], KFAC_NAME, None, 0, record)
        assert trial.end == math.inf
        json.dumps(trial.train_loss, allow_nan=False)


# -------------------------------------------------------------------------------------------- score


def made(optimizer, lr, seed, losses, errors=None, failure=""):
    return Trial(
        "wine", optimizer, lr, seed, losses, errors or [9.0] * len(losses), 7, 1.0, failure
    )


def losses(end, *, first=1.0, middle=0.5):
    return [first, *[middle] * (len(MARKS) - 2), end]


def line_of(kfac_ends, adamw_ends, best=0.01):
    """The line of runs with these losses at the end, where one learning rate was the best."""
    trials = [
        made(ADAMW_NAME, lr, TUNING_SEED, losses(0.1 if lr == best else 0.2))
        for lr in LEARNING_RATES
    ]
    for name, lr, ends in ((KFAC_NAME, None, kfac_ends), (ADAMW_NAME, best, adamw_ends)):
        trials += [
            made(name, lr, seed, end if isinstance(end, list) else losses(end))
            for seed, end in enumerate(ends)
        ]
    (line,) = lines_of(["wine"], {t.key: t for t in trials}, len(kfac_ends))
    return line


def test_the_lower_median_wins():
    line = line_of([0.1, 0.4, 0.2], [0.3, 0.1, 0.8])
    assert (line.kfac.loss, line.kfac.least, line.kfac.most) == (0.2, 0.1, 0.4)
    assert (line.adamw.loss, line.lr) == (0.3, 0.01)
    assert line.verdict == "K-FAC"
    assert line.ratio == pytest.approx(1.5)
    assert line_of([0.3], [0.2]).verdict == "AdamW"


def test_two_that_solved_a_problem_tie():
    solved = line_of([FLOOR / 100], [FLOOR / 2])
    assert (solved.verdict, solved.ratio) == ("tie", 1)
    assert line_of([FLOOR / 100], [FLOOR * 2]).verdict == "K-FAC"
    assert line_of([FLOOR / 2], [0.0]).verdict == "tie"
    text = summary([solved, line_of([0.1], [0.2]), line_of([0.2], [0.1])])
    assert (
        "K-FAC on 1 of 3 problems, AdamW on 1, 1 tied (K-FAC's is the lower number in 1)." in text
    )


def test_divergence_is_counted():
    fine, above = losses(0.5), losses(1.5)
    not_finite, rose = [1.0, 0.5, None], losses(0.1, middle=2.0)
    line = line_of([fine, above, not_finite, rose], [0.1] * 4)
    assert (line.kfac.diverged, line.kfac.rose, line.kfac.runs) == (2, 1, 4)
    assert line.kfac.most == math.inf
    assert "Of 4 runs with K-FAC 2 diverged, and 1 more" in summary([line])
    both = line_of([not_finite], [not_finite])
    assert both.verdict == "tie"
    assert math.isnan(both.ratio)


def test_the_best_validation_error_is_taken_seed_by_seed():
    errors = [[9.0, 1.0, 5.0], [9.0, 8.0, 3.0], [9.0, None, None]]
    trials = [made(ADAMW_NAME, lr, TUNING_SEED, losses(0.1)) for lr in LEARNING_RATES]
    trials += [made(KFAC_NAME, None, s, [1.0, 0.5, 0.2], e) for s, e in enumerate(errors)]
    trials += [made(ADAMW_NAME, LEARNING_RATES[0], s, losses(0.1)) for s in range(3)]
    (line,) = lines_of(["wine"], {t.key: t for t in trials}, 3)
    assert (line.kfac.error, line.kfac.best_error) == (5.0, 3.0)


# ------------------------------------------------------------------------------------------ command


@pytest.fixture
def ordinary(tmp_path):
    def run(*words, folder=tmp_path / "ordinary"):
        options = ("--seconds", 0.03, "--seeds", 1, "--run-dir", folder)
        return kronfac("bench", "ordinary", *options, *words)

    return run


def result(tmp_path):
    return json.loads((tmp_path / "ordinary" / "ordinary.json").read_text())


def test_the_command_runs_and_writes_everything(ordinary, tmp_path, capsys):
    text = tmp_path / "results" / "ordinary.md"
    assert ordinary("--problems", "iris", "wine", "--output", text) == 0
    out = capsys.readouterr().out
    assert "2 problem(s), 18 runs of 0.03 s: at most 0:00:01" in out
    assert "of 2 problems" in out
    trials = result(tmp_path)["trials"]
    assert len(trials) == 2 * (len(LEARNING_RATES) + 2)
    assert {trial["seed"] for trial in trials} == {0, TUNING_SEED}
    markdown = text.read_text()
    assert (
        "Made by `kronfac bench ordinary --problems iris wine --seconds 0.03 --seeds 1" in markdown
    )
    for part in ("| wine |", "| iris |", "weight_decay 0", "seed 100", "(ordinary.png)", "torch 2"):
        assert part in markdown
    assert text.with_suffix(".png").stat().st_size > 20_000
    page = (tmp_path / "ordinary" / "ordinary.html").read_text()
    assert page.count('src="data:image/png') == 1
    assert not re.search(r'(src|href)="(?!#|data:)', page), "nothing from elsewhere"
    assert f"Wrote {tmp_path / 'ordinary' / 'ordinary.html'}" in out


def test_what_has_run_is_not_run_again(ordinary, tmp_path, capsys):
    assert ordinary("--problems", "linnerud") == 0
    first = result(tmp_path)["trials"]
    capsys.readouterr()
    assert ordinary("--problems", "linnerud") == 0
    assert "All runs are in" in capsys.readouterr().out
    assert result(tmp_path)["trials"] == first
    assert ordinary("--problems", "linnerud", "wine", "--seeds", 2) == 0
    assert "2 problem(s), 13 runs" in capsys.readouterr().out
    assert result(tmp_path)["trials"][: len(first)] == first
    assert ordinary("--problems", "linnerud", "--seconds", 0.04) == 2
    assert "other settings (seconds)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--problems", "unicorn"), "--problems are of digits, digits-deep"),
        (("--seconds", 0), "--seconds is positive and finite; got 0"),
        (("--seconds", "nan"), "--seconds is positive and finite; got nan"),
        (("--seeds", 0), "--seeds is 1 to 100; got 0"),
        (("--threads", 0), "--threads is 1 or more; got 0"),
        (("--output", "table.txt"), "--output is a .md file; got table.txt"),
    ],
)
def test_mistakes_are_answered_with_a_line(ordinary, words, message, tmp_path, capsys):
    assert ordinary(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "ordinary").exists()


def test_help(capsys):
    assert kronfac("bench", "ordinary", "--help") == 0
    out = capsys.readouterr().out
    for option in ("--problems", "--seconds", "--seeds", "--quick", "--threads", "--output"):
        assert option in out
    assert "None" not in out
