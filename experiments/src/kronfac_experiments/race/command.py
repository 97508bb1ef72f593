"""`kronfac race`: run what is missing, and keep every run in a JSONL file."""

import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from kronfac_experiments.machine import machine, versions
from kronfac_experiments.options import at_least, hint
from kronfac_experiments.progress import clock, number
from kronfac_experiments.race.contestants import (
    Contestant,
    Schedule,
    contestants_named,
)
from kronfac_experiments.race.plan import TUNING_SEED, Entry, Lane, Terms, score
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.race.problems import GROUPS, group_of, problems_named
from kronfac_experiments.race.records import Cost, Records, Run, code_of
from kronfac_experiments.race.run import (
    MARKS,
    TUNING_MARKS,
    Training,
    clock_for,
    run,
    step_costs,
)
from kronfac_experiments.train import TrainingInterruptedError

COMMITTED = Path("docs/results/runs")
"""Where the runs of a checkout are."""
USUAL = ("kfac", "adamw", "muon", "soap")


@dataclass(frozen=True)
class RaceConfig:
    """Race optimizers on problems, for equal seconds or steps, and keep every run.

    All contestants have the same budget, schedule and seeds. Those with a grid are tuned first, every
    point for the full budget, on a seed that is in no race. With --seconds, the cost of a step is measured
    once, contestants taking turns, and everyone gets the steps that fit. Runs are appended to a JSONL file
    for each group of problems, and none is repeated: an interrupted race goes on when the command is given
    again. Several processes may run the same command: each takes problems that no other is running.
    """

    problems: Annotated[tuple[str, ...], tyro.conf.Positional, hint("PROBLEM ...", "none")] = ()
    """Problems, or the groups networks, small, physics and autoencoders."""
    contestants: Annotated[tuple[str, ...], hint("NAME ...", " ".join(USUAL))] = USUAL
    """Who races."""
    seconds: Annotated[float | None, hint("FLOAT", "30 without --steps")] = None
    """Seconds of optimizer time of each run."""
    steps: Annotated[int | None, hint("INT", "none")] = None
    """Steps of each run, in place of seconds."""
    seeds: int = 3
    """How many, from 0."""
    schedule: Schedule = "cosine"
    """Of the learning rate over the run; K-FAC and L-BFGS have none."""
    weight_decay: tuple[float, ...] = (0.01,)
    """Decoupled weight decay of those that have one, the same for all; several values are tuned."""
    tune_fully: bool = False
    """Whether a problem's other mini-batches, and a contestant's other constants, are tried at the best
    point of the grid."""
    any_code: bool = False
    """Whether runs of other versions of the code count: after an edit that changes no number."""
    threads: int = 1
    """CPU threads."""
    runs: Annotated[Path | None, hint("DIR", f"{COMMITTED} if it is there, else runs/race")] = None
    """Folder of the JSONL files."""

    def __post_init__(self) -> None:
        if not self.problems:
            raise ValueError(f"Name problems, or groups of them: {', '.join(GROUPS)}.")
        problems_named(self.problems)
        contestants_named(self.contestants)
        if self.seconds is not None and self.steps is not None:
            raise ValueError("Give --seconds or --steps, not both.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds is positive and finite; got {self.seconds}.")
        at_least(1, seeds=self.seeds, threads=self.threads)
        if self.steps is not None:
            at_least(1, steps=self.steps)
        at_least(0, weight_decay=self.weight_decay)
        if self.seeds > TUNING_SEED:
            raise ValueError(f"--seeds is at most {TUNING_SEED}; got {self.seeds}.")

    @property
    def terms(self) -> Terms:
        """What is the same for everyone."""
        seconds = 30.0 if self.seconds is None else float(self.seconds)
        budget = {"seconds": seconds} if self.steps is None else {"steps": float(self.steps)}
        return Terms(
            budget, self.seeds, self.schedule, self.weight_decay, self.tune_fully, self.threads,
            self.any_code,
        )  # fmt: skip

    @property
    def folder(self) -> Path:
        """Where the JSONL files are."""
        return self.runs or (COMMITTED if COMMITTED.is_dir() else Path("runs/race"))


def race_command(config: RaceConfig) -> list[Path]:
    """Run what is missing; return the files."""
    console = Console(highlight=False, soft_wrap=True)
    problems = problems_named(config.problems)
    contestants = contestants_named(config.contestants)
    return race(problems, contestants, config.terms, config.folder, console)


def race(
    problems: Sequence[Problem],
    contestants: Sequence[Contestant],
    terms: Terms,
    folder: Path,
    console: Console,
) -> list[Path]:
    """Run what is missing, with a progress bar in a terminal.

    Raises:
        TrainingInterruptedError: Ctrl-C; runs that have ended are kept.
    """
    torch.set_num_threads(terms.threads)
    lanes = lanes_of(problems, contestants, terms, folder)
    left = sum(lane.runs_left for own in lanes.values() for lane in own)
    console.print(budget(left, terms))
    columns = (
        TextColumn("{task.description:<44.44}"),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total:.0f} runs"),
        TimeRemainingColumn(),
    )
    taken = []
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=left)
            for name, own in lanes.items():
                with own[0].records.claimed(name) as free:
                    if free:
                        _race_on_a_problem(own, progress, bar)
                    else:
                        taken.append(name)
    except KeyboardInterrupt as stop:
        message = (
            f"Stopped; the runs that have ended are in {folder}. Continue with the same command."
        )
        raise TrainingInterruptedError(message, signal.SIGINT) from stop
    if taken:
        console.print(f"Left to other processes, which are running them: {', '.join(taken)}.")
    return list(dict.fromkeys(lane.records.path for own in lanes.values() for lane in own))


def _race_on_a_problem(lanes: Sequence[Lane], progress: Progress, bar: TaskID) -> None:
    while missing := [(lane, entry) for lane in lanes for entry in lane.missing[:1]]:
        # Contestants take turns, so that a slow hour hits all of them.
        if "seconds" in lanes[0].terms.budget and not lanes[0].terms.by_clock:
            progress.update(bar, description=f"{lanes[0].problem.name}: cost of a step")
            _measure_costs(lanes)
        for lane, entry in missing:
            name = f"{entry.problem.name}: {entry.contestant.label}, seed {entry.seed}"
            done = progress.tasks[0].completed
            progress.update(bar, description=name)

            def tick(share: float, at: float = done) -> None:
                progress.update(bar, completed=at + share)

            ended = run_entry(lane, entry, tick)
            lane.records.append(ended)
            progress.update(bar, completed=done + 1)
            progress.console.print(_outcome(entry, ended))


def lanes_of(
    problems: Sequence[Problem],
    contestants: Sequence[Contestant],
    terms: Terms,
    folder: Path,
) -> dict[str, list[Lane]]:
    """The contestants on each problem, with the runs of the group's file."""
    files = {name: Records(folder / f"{name}.jsonl") for name in map(group_of, problems)}
    return {
        problem.name: [
            Lane(problem, contestant, terms, files[group_of(problem)]) for contestant in contestants
        ]
        for problem in problems
    }


def budget(runs: int, terms: Terms) -> str:
    """How much is left, in words."""
    if not runs:
        return "All runs are there already."
    if "seconds" not in terms.budget:
        return f"{runs} runs of {terms.budget['steps']:,.0f} steps are left."
    seconds = terms.budget["seconds"]
    return (
        f"{runs} runs of {seconds:g} s are left: {clock(runs * seconds)} (h:mm:ss) of optimizer time, and "
        "some for step costs and evaluation."
    )


def run_entry(lane: Lane, entry: Entry, tick: Callable[[float], None]) -> Run:
    """Make a run."""
    terms, contestant = entry.terms, entry.contestant
    training = _training(entry)
    steps: int | None = None
    if "steps" in terms.budget:
        steps = int(terms.budget["steps"])
    elif contestant.sampler is None and not terms.by_clock:
        cost = lane.cost(entry.settings["batch"])
        assert cost is not None
        steps = cost.steps_in(terms.budget["seconds"])
    rows, message = run(
        training,
        steps=steps,
        seconds=terms.budget.get("seconds"),
        marks=TUNING_MARKS if entry.seed == TUNING_SEED else MARKS,
        tick=tick,
    )
    return Run(
        entry.problem.name, contestant.recorded_as, entry.settings, entry.seed, terms.budget,
        terms.schedule, terms.threads, code_of(contestant), rows, message, training.state_bytes,
        training.weight_bytes,
        f"{machine()['processor'] or 'unknown processor'}, torch {versions()['torch']}",
    )  # fmt: skip


def _training(entry: Entry) -> Training:
    return Training(
        entry.problem,
        entry.contestant,
        entry.settings,
        entry.seed,
        entry.terms.schedule,
        clock_for(entry.terms.threads),
    )


def _measure_costs(lanes: Sequence[Lane]) -> None:
    """Measure what is not known, in turns with what is, which says how fast the machine is now."""
    wanted: dict[tuple[str, float | None], tuple[Lane, Entry]] = {}
    for lane in lanes:
        if lane.contestant.sampler is None:
            for entry in (*lane.missing, *(e for stage in lane.tuning for e in stage)):
                batch = entry.settings["batch"]
                wanted.setdefault((lane.contestant.recorded_as, batch), (lane, entry))
    costs = [lane.cost(entry.settings["batch"]) for lane, entry in wanted.values()]
    if None not in costs:
        return
    for _, entry in wanted.values():
        _training(entry).step(0.5)  # what PyTorch loads at first use is no contestant's time
    terms, records = lanes[0].terms, lanes[0].records
    trainings = [_training(entry) for _, entry in wanted.values()]
    measured = step_costs(trainings, limit=terms.budget["seconds"] / 2)
    known = [(cost.step, step) for cost, (_, step) in zip(costs, measured, strict=True) if cost]
    speed = sum(old for old, _ in known) / sum(new for _, new in known) if known else 1.0
    for cost, (lane, entry), (start, step) in zip(costs, wanted.values(), measured, strict=True):
        if cost is None:
            records.append(
                Cost(
                    lane.problem.name, lane.contestant.recorded_as, entry.settings["batch"], terms.threads,
                    code_of(lane.contestant), speed * start, speed * step,
                )
            )  # fmt: skip


def _outcome(entry: Entry, ended: Run) -> str:
    settings = "".join(
        f", {name.replace('_', ' ')} {value:g}" for name, value in entry.settings.items() if value
    )
    who = f"{entry.problem.name}: {entry.contestant.label}{settings}, seed {entry.seed}"
    if ended.message:
        return f"{who}: {ended.message}"
    steps = f"{ended.rows[-1][0]:,.0f} steps"
    return f"{who}: {entry.problem.judged_by} {number(score(entry.problem, ended))} after {steps}"
