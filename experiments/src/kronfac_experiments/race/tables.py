"""The tables of a race: what decides, how contestants compare, and what they cost."""

import math
from collections.abc import Callable, Sequence
from statistics import median, stdev
from typing import Literal

import torch

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import ParameterPlan
from kronfac_experiments.pages.document import Table
from kronfac_experiments.race.models import GPT, resnet50
from kronfac_experiments.race.plan import Lane, score
from kronfac_experiments.race.records import METRIC, VALIDATION

LEVEL = 0.01
"""Two losses are level within this share, or within two standard errors of their difference."""
MISSING = "–"
Race = dict[str, list[Lane]]
"""The contestants on each problem."""


def scores(race: Race) -> Table:
    """What decides on each problem, and which runs are missing."""
    judged = {lane.problem.judged_by for own in race.values() for lane in own}
    what = "Training loss at the end" if judged == {"training"} else "Lowest validation loss"
    note = (
        "Median of the seeds; the lowest of a line is bold. ! marks a learning rate at the end of those "
        "tried, beyond which a better one may lie."
    )
    unfinished = [
        f"{name} ({sum(lane.runs_left for lane in own):,} runs are left)"
        for name, own in race.items()
        if not _is_complete(own)
    ]
    if unfinished:
        note += f" Not finished: {', '.join(unfinished)}."

    def cell(lane: Lane, own: Sequence[Lane]) -> str:
        value, best = _median(lane), min(map(_median, own))
        if not math.isfinite(value):
            return MISSING
        shown = _digits(value)
        if value == best and _is_complete(own):
            shown = f"**{shown}**"
        return shown + (" !" if lane.on_the_edge else "")

    return _by_problem(what, race, cell, note, detail=False)


def details(race: Race, chose: Sequence[str]) -> list[Table]:
    """All else about a race with optimizers of kronfac and others.

    Args:
        race: The contestants on each problem.
        chose: Problems on which kronfac's constants were chosen.
    """
    race = {name: own for name, own in race.items() if any(lane.runs for lane in own)}
    complete = {name: own for name, own in race.items() if _is_complete(own)}
    compared = [_over_the_best(complete, chose), _counts(complete, chose), _input_factors(complete)]
    return [
        _by_problem(
            "Spread", race, lambda lane, own: f"{_error(lane):.2g}" if lane.runs else MISSING,
            "Standard error of the loss over the seeds.",
        ),
        *(compared if complete else []),
        *_measures(race),
    ]  # fmt: skip


def contestants(race: Race) -> Table:
    """How each is set up, what was tuned, and the versions of the code that ran."""
    rows = []
    for column in zip(*race.values(), strict=True):
        contestant, terms = column[0].contestant, column[0].terms
        grid = dict(contestant.grid)
        if contestant.decays:
            grid["weight_decay"] = terms.weight_decays
        tuned = "; ".join(
            f"{name.replace('_', ' ')} {', '.join(f'{value:g}' for value in values)}"
            for name, values in grid.items()
        )
        codes = sorted({run.code for lane in column for run in lane.runs})
        setup = contestant.remark or "PyTorch's defaults"
        cells = (setup, tuned or MISSING, ", ".join(codes) or MISSING)
        rows.append((contestant.label, *cells))
    columns = ("", "set up", "tuned over", "code")
    return Table("The contestants", columns, rows, detail=True)


# ------------------------------------------------------------------------------------------ comparison


def _is_complete(own: Sequence[Lane]) -> bool:
    return all(len(lane.runs) == lane.terms.seeds or not lane.runs_left for lane in own)


def _seeds(lane: Lane) -> list[float]:
    """What decides, for each seed."""
    return [score(lane.problem, run) for run in lane.runs]


def _median(lane: Lane) -> float:
    return median(_seeds(lane)) if lane.runs else math.inf


def _error(lane: Lane) -> float:
    """The standard error over the seeds; 0 where it can't be known."""
    found = _seeds(lane)
    known = len(found) > 1 and all(map(math.isfinite, found))
    return stdev(found) / math.sqrt(len(found)) if known else 0.0


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}".rstrip(".")


def _best_peer(own: Sequence[Lane]) -> Lane:
    return min((lane for lane in own if lane.contestant.code != "kronfac"), key=_median)


def _ours(own: Sequence[Lane]) -> list[Lane]:
    return [lane for lane in own if lane.contestant.code == "kronfac"]


def _beside(lane: Lane, other: Lane) -> Literal["ahead", "level", "behind"]:
    value, reference = _median(lane), _median(other)
    band = max(LEVEL * reference, 2 * math.hypot(_error(lane), _error(other)))
    if abs(value - reference) <= band:
        return "level"
    return "ahead" if value < reference else "behind"


def _ratio(lane: Lane, other: Lane) -> float:
    return _median(lane) / _median(other)


def _over_the_best(race: Race, chose: Sequence[str]) -> Table:
    """The loss of each of kronfac's optimizers over that of the best other one."""

    def cell(lane: Lane, peer: Lane) -> str:
        shown = f"{_ratio(lane, peer):.3f}"
        return {"ahead": f"**{shown}**", "level": f"{shown} =", "behind": shown}[
            _beside(lane, peer)
        ]

    rows = []
    for name, own in race.items():
        role = "constants chosen on it" if name in chose else "judge"
        peer = _best_peer(own)
        rows.append((name, role, peer.contestant.label, *(cell(lane, peer) for lane in _ours(own))))
    labels = [lane.contestant.label for lane in _ours(next(iter(race.values()), []))]
    note = (
        "Bold: ahead of the best peer; = marks level with it, within 1 % or two standard errors. The "
        "constants of kronfac's optimizer were chosen on some problems; the others judge them."
    )
    columns = ("problem", "role", "best peer", *labels)
    return Table("Loss over the best peer's", columns, rows, note)


def _counts(race: Race, chose: Sequence[str]) -> Table:
    """On how many problems each of kronfac's optimizers is ahead, level and behind."""
    groups = {
        "judges": {name: own for name, own in race.items() if name not in chose},
        "all": race,
    }
    rows = []
    for k, label in enumerate(
        lane.contestant.label for lane in _ours(next(iter(race.values()), []))
    ):
        for group, part in groups.items():
            pairs = [(_ours(own)[k], _best_peer(own)) for own in part.values()]
            verdicts = [_beside(*pair) for pair in pairs]
            worst = max((_ratio(*pair) for pair in pairs), default=math.nan)
            counts = [str(verdicts.count(v)) for v in ("ahead", "level", "behind")]
            rows.append(
                (label, group, str(len(part)), *counts, f"{worst:.3f}" if part else MISSING)
            )
    columns = ("", "problems", "finished", "ahead", "level", "behind", "largest ratio")
    note = "The largest ratio is that of the losses; below 1, the optimizer is ahead everywhere."
    return Table("Beside the best peer", columns, rows, note)


def _input_factors(race: Race) -> Table:
    """What A is worth: the tuned optimizer with and without it."""
    rows = []
    for name, own in race.items():
        lanes = {lane.contestant.name: lane for lane in own}
        if {"ours", "ours-without-a"} <= lanes.keys():
            pair = lanes["ours"], lanes["ours-without-a"]
            gain = 100 * (1 - _ratio(*pair))
            noise = 200 * math.hypot(*map(_error, pair)) / _median(pair[1])
            rows.append(
                (name, *(_digits(_median(lane)) for lane in pair), f"{gain:.1f}", f"{noise:.1f}")
            )
    columns = ("problem", "with A", "without A", "gain, %", "two standard errors, %")
    note = "Gain: by how much A lowers the loss; a gain within two standard errors may be chance."
    return Table("What A is worth", columns, rows, note)


# -------------------------------------------------------------------------------------------- measures


def _by_problem(
    heading: str,
    race: Race,
    cell: Callable[[Lane, list[Lane]], str],
    note: str = "",
    detail: bool = True,
) -> Table:
    """A row for each problem, a column for each contestant; a cell also sees the others of its row."""
    labels = [lane.contestant.label for lane in next(iter(race.values()))]
    rows = [(name, *(cell(lane, own) for lane in own)) for name, own in race.items()]
    return Table(heading, ("problem", *labels), rows, note, detail)


def _measures(race: Race) -> list[Table]:
    # Who has another contestant's runs has its step costs and state, too.
    apart = {n: [lane for lane in own if not lane.contestant.runs_of] for n, own in race.items()}
    first = next(iter(apart.values()))[0].contestant.label

    def metric(lane: Lane, own: list[Lane]) -> str:
        lowest = [
            min(run.rows, key=lambda row: row[VALIDATION])[METRIC] for run in lane.runs if run.rows
        ]
        return _digits(median(lowest)) if lowest else MISSING

    def cost(lane: Lane, own: list[Lane]) -> str:
        batch = lane.problem.batches[0]
        mine, base = lane.cost(batch), own[0].cost(batch)
        return f"{mine.step / base.step:.2f}" if mine and base else MISSING

    def state(lane: Lane, own: list[Lane]) -> str:
        found = [run.state_bytes / run.weight_bytes for run in lane.runs if run.weight_bytes]
        return f"{max(found):.2f}" if found else MISSING

    def chosen(lane: Lane, own: list[Lane]) -> str:
        settings = lane.runs[0].settings if lane.runs else {}
        words = (f"{k.replace('_', ' ')} {v:g}" for k, v in settings.items() if v is not None)
        return ", ".join(words) or MISSING

    metrics = "; ".join(f"{name}: {own[0].problem.metric_name}" for name, own in race.items())
    in_turn = "At the usual mini-batch, measured once, contestants taking turns."
    tuned = "As tuned, on a seed that is in no race."
    return [
        _by_problem("Metric at the lowest validation loss", race, metric, f"{metrics}."),
        _by_problem(f"Cost of a step over {first}'s", apart, cost, in_turn),
        _by_problem("Bytes of state over bytes of weights", apart, state),
        _by_problem("Settings", race, chosen, tuned),
    ]


def estimates() -> list[Table]:
    """What `WhitenedMomentum.plan` says of networks that are too large for this race."""
    with torch.device("meta"):
        networks = {
            "ResNet-50, 64 images of 224 × 224 pixels": (resnet50(), torch.zeros(64, 3, 224, 224)),
            "GPT of 18 layers, width 2,048 and 50,257 symbols, 32 windows of 1,024": (
                GPT(50_257, 1024, 2048, 18, 16),
                torch.zeros(32, 1024, dtype=torch.int64),
            ),
        }
    tables = []
    for name, (model, example) in networks.items():
        plan = WhitenedMomentum(model).plan(example)
        alike: dict[tuple[str, str], list[ParameterPlan]] = {}
        for row in plan.rows:
            shape = " × ".join(map(str, row.shape))
            if row.products:
                alike.setdefault((shape, row.method), []).append(row)
        products = sum(row.products for row in plan.rows)
        rows = [
            (
                *kind, str(len(some)),
                f"{100 * sum(row.products for row in some) / products:.1f}",
                f"{100 * sum(row.added for row in some) / products:.1f}",
                f"{sum(row.bytes for row in some) / 1e6:,.1f}",
            )
            for kind, some in alike.items()
        ]  # fmt: skip
        size = sum(p.numel() for p in model.parameters())
        note = (
            f"{size / 1e6:,.0f} million parameters. All together: {plan.cost:.2f} × the operations of "
            f"AdamW's step, counting products with weights only; state of {plan.state:.2f} × the weights."
        )
        columns = ("weights", "method", "number", "their products, %", "added, %", "state, MB")
        tables.append(Table(f"Estimate: {name}", columns, rows, note, detail=True))
    return tables
