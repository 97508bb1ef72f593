"""The race on networks in tables: K-FAC beside AdamW, everyone on each problem, rates, problems."""

import math
import os
from collections.abc import Callable, Sequence

from kronfac_experiments.bench.race.config import TUNING_SEED
from kronfac_experiments.bench.race.networks.network_race import SLICE, NetworkRace
from kronfac_experiments.bench.race.networks.racers import KFAC_RACER, REFERENCE, WARM_UP
from kronfac_experiments.bench.race.networks.scores import Reached, Score, middle, scores_of
from kronfac_experiments.machine import machine, versions
from kronfac_experiments.pages.document import Table, spread
from kronfac_experiments.progress import number

NOTHING = "–"
LEVEL = 0.01
"""Two losses or metrics that differ by less than this share are level."""


def tables(races: Sequence[NetworkRace]) -> list[Table]:
    """All of them."""
    return [
        _summary(races),
        *(_problem(race) for race in races),
        _tuning(races),
        _problems(races),
        _field(races),
    ]


def settings(race: NetworkRace) -> str:
    """What the numbers depend on."""
    sizes, config = race.config.sizes, race.config
    measured = " by the processor's clock" if config.clock == "processor" else ""
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{sizes.seconds:g} s of optimiser time a run{measured}, {sizes.seeds} seed(s) from 0, "
        f"{config.threads} thread(s) of {os.cpu_count()} processors, "
        f"{machine()['processor'] or 'unknown processor'}; float32; {made}."
    )


def _summary(races: Sequence[NetworkRace]) -> Table:
    rows = []
    for race in races:
        scores = {score.racer.name: score for score in scores_of(race)}
        ours, theirs = scores.get(KFAC_RACER.name), scores.get(REFERENCE.name)
        if ours is None:
            continue
        rivals = [s for s in scores.values() if not s.racer.is_kfac]
        rows.append(
            (
                race.problem.name,
                _beside(ours, theirs, lambda s: s.training),
                _beside(ours, theirs, lambda s: s.validation),
                _beside(ours, theirs, lambda s: s.metric),
                _ratio(ours.to_training, lambda r: r.steps_ratio),
                _ratio(ours.to_training, lambda r: r.seconds_ratio),
                _ratio(ours.to_validation, lambda r: r.steps_ratio),
                _ratio(ours.to_validation, lambda r: r.seconds_ratio),
                _best_rival(ours, rivals),
            )
        )
    columns = (
        "problem",
        "training loss at the end",
        "best validation loss",
        "best validation metric",
        "steps, training",
        "seconds, training",
        "steps, validation",
        "seconds, validation",
        "validation metric of the best rival",
    )
    note = (
        f"K-FAC's median of the seeds / that of {REFERENCE.label}, and how K-FAC's is the other one's: "
        f"lower is ahead, within {100 * LEVEL:g} % is level. Steps and seconds: K-FAC's to the last "
        f"training loss, or to the best validation loss, of {REFERENCE.label}, over what the latter took, "
        "seed by seed, median; below 1 is ahead. The best rival is the one with the lowest metric of all "
        "that are not K-FAC."
    )
    return Table("K-FAC beside AdamW with a cosine schedule", columns, rows, note)


def _beside(ours: Score, theirs: Score | None, of: Callable[[Score], list[float]]) -> str:
    own = middle(of(ours))
    other = None if theirs is None else middle(of(theirs))
    if own is None:
        return "diverged"
    if other is None:
        return number(own)
    return f"{number(own)} / {number(other)}: {verdict(own, other)}"


def verdict(own: float, other: float) -> str:
    """Ahead, level, or behind, and by how much of the other's."""
    if own == other:
        return "level"
    if other <= 0:
        return "behind"
    change = own / other - 1
    if abs(change) < LEVEL:
        return "level"
    amount = f"{100 * abs(change):.0f} %" if change < 1 else f"{own / other:.1f} times"
    return f"ahead by {amount}" if change < 0 else f"behind by {amount}"


def _ratio(reached: Reached | None, of: Callable[[Reached], list[float | None]]) -> str:
    if reached is None:
        return NOTHING
    found = middle(of(reached))
    return "not reached" if found is None else f"{found:.2g}"


def _best_rival(ours: Score, rivals: Sequence[Score]) -> str:
    found = {s.racer.label: value for s in rivals if (value := middle(s.metric)) is not None}
    own = middle(ours.metric)
    if not found or own is None:
        return NOTHING
    label = min(found, key=lambda name: found[name])
    return f"{label} {number(found[label])}: {verdict(own, found[label])}"


def _problem(race: NetworkRace) -> Table:
    rows: list[tuple[str, ...]] = []
    for score in scores_of(race):
        rate = NOTHING if score.lr is None else f"{score.lr:g}{' !' if score.on_the_edge else ''}"
        failed = f", {score.failed} ended early" if score.failed else ""
        rows.append(
            (
                score.racer.label,
                rate,
                str(score.batch),
                _spread(score.steps, ",.0f"),
                _spread(score.training) + failed,
                _spread(score.validation),
                _spread(score.metric),
                *_to(score.to_training),
                *_to(score.to_validation),
            )
        )
    raced = [row[0] for row in rows]
    rows += [
        (racer.label, "failed at every rate", *[NOTHING] * 9)
        for racer in race.racers
        if racer.label not in raced
    ]
    columns = (
        "",
        "rate",
        "batch",
        "steps",
        "training loss",
        "validation loss",
        f"validation {race.problem.metric_name}",
        "steps to training",
        "seconds",
        "steps to validation",
        "seconds",
    )
    note = (
        "Median (least – most) of the seeds: training loss at the end, validation at best. Steps and "
        f"seconds to the training loss at the end, and to the best validation loss, of {REFERENCE.label} "
        "with the same seed; ! marks a rate at the end of those tried."
    )
    return Table(f"{race.problem.name}: {race.problem.about}", columns, rows, note)


def _to(reached: Reached | None) -> tuple[str, str]:
    if reached is None:
        return NOTHING, NOTHING
    missed = sum(value is None for value in reached.steps)
    if missed == len(reached.steps):
        return "not reached", NOTHING
    there = f" in {len(reached.steps) - missed} of {len(reached.steps)}" if missed else ""
    steps = [value for value in reached.steps if value is not None]
    seconds = [value for value in reached.seconds if value is not None]
    return _spread(steps, ",.0f") + there, _spread(seconds, ".3g")


def _spread(values: Sequence[float], form: str = ".4g") -> str:
    def show(value: float) -> str:
        return f"{value:{form}}" if math.isfinite(value) else "∞"

    return show(values[0]) if len(values) == 1 else spread(values, show)


def _tuning(races: Sequence[NetworkRace]) -> Table:
    rows = []
    for race in races:
        for racer in (racer for racer in race.racers if racer.rates):
            chosen = race.rate(racer)
            tried = []
            for trial in race.found("tune", racer):
                found = trial.best("validation loss")
                value = "failed" if trial.message else number(found)
                tried.append(f"{trial.lr:g}: {value}{'*' if trial.lr == chosen else ''}")
            rows.append((race.problem.name, racer.label, "; ".join(tried)))
    sizes = races[0].config.sizes
    note = (
        f"Peak rate and best validation loss of {sizes.tune_seconds:g} s with seed {TUNING_SEED}, its "
        "schedule over these seconds; * is the one that raced. Every method but K-FAC was tuned, with as "
        "many rates."
    )
    return Table("The rates", ("problem", "", "tried"), rows, note, detail=True)


def _problems(races: Sequence[NetworkRace]) -> Table:
    rows = []
    for race in races:
        problem = race.problem
        clip = NOTHING if problem.clip is None else f"{problem.clip:g}"
        examples = (problem.split.train, problem.split.validation)
        rows.append(
            (
                problem.name,
                problem.about,
                f"{problem.parameters:,}",
                " + ".join(f"{len(part):,}" for part in examples),
                " + ".join(f"{count:,}" for count in race.evaluated),
                clip,
            )
        )
    note = (
        "Examples of training and validation, those that are evaluated, at equal distances, and the "
        "largest norm of a gradient of first-order methods. For MNIST, validation is the last 10,000 "
        "training images."
    )
    columns = ("problem", "data and network", "parameters", "examples", "evaluated", "clipped")
    return Table("The problems", columns, rows, note, detail=True)


def _field(races: Sequence[NetworkRace]) -> Table:
    rows = [
        (
            racer.label,
            racer.schedule if racer.rates else NOTHING,
            racer.remark or "PyTorch's defaults",
        )
        for racer in races[0].racers
    ]
    note = (
        f"Cosine: the rate rises for {100 * WARM_UP:g} % of the run's seconds and falls along half a "
        "cosine to 1 % of its peak. Only steps are on the clock. Runs with one seed have the same initial "
        f"parameters and take turns of {SLICE:g} s. Evaluated in eval() mode are the current parameters or "
        "the average of about the last tenth of the iterates, whichever has the lower training loss, for "
        "everyone."
    )
    return Table("The field", ("", "schedule", "set up"), rows, note, detail=True)
