"""Runs of all methods on all equations; every run is written down when it ends, and none is run twice."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from torch import Tensor

from kronfac import KronfacError
from kronfac_experiments.bench.physics.config import TUNING_SEED, PhysicsConfig
from kronfac_experiments.bench.physics.equations import EQUATIONS, Equation
from kronfac_experiments.bench.physics.methods import METHODS, Method
from kronfac_experiments.machine import versions
from kronfac_experiments.trial_store import TrialStore

MARKS = (0.0, 0.01, 0.02, 0.03, *(k / 40 for k in range(2, 41)))
"""Shares of the seconds at which the error is measured, closer at the start."""
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


@dataclass(frozen=True)
class Trial:
    """A run: its error at each mark that it reached; None if that was not finite."""

    equation: str
    method: str
    setting: float | None
    seed: int
    errors: list[float | None]
    losses: list[float | None]
    steps: int

    @property
    def key(self) -> "Key":
        """What it is found by."""
        return self.equation, self.method, self.setting, self.seed

    @property
    def curve(self) -> list[float]:
        """Errors at all of MARKS; the last one stands for those after a failure."""
        found = [math.inf if error is None else error for error in self.errors]
        return found + [found[-1]] * (len(MARKS) - len(found))

    @property
    def end(self) -> float:
        """The error at the end."""
        return self.curve[-1]


Key = tuple[str, str, float | None, int]
Trials = Mapping[Key, Trial]


def run_trials(config: PhysicsConfig, console: Console) -> dict[Key, Trial]:
    """All trials of these equations, those of earlier commands included."""
    found: dict[Key, Trial] = {}
    for equation in config.chosen:
        path = config.folder / f"{equation.name}.json"
        trials = TrialStore(path, _settings(config), Trial, key=lambda trial: trial.key)
        for method in config.solvers:
            for setting in method.grid:
                _keep(config, equation, method, setting, TUNING_SEED, trials, console)
        for seed in range(config.starts):
            for method in config.solvers:
                best = best_setting(equation.name, method, trials)
                _keep(config, equation, method, best, seed, trials, console)
        found |= dict(trials)
    return found


def best_setting(equation: str, method: Method, trials: Trials) -> float | None:
    """The one with the lowest error at the end of the run that tuned it."""
    if not method.grid:
        return None
    ends = {s: trials[equation, method.name, s, TUNING_SEED].end for s in method.grid}
    return min(method.grid, key=lambda setting: ends[setting])


def _keep(
    config: PhysicsConfig,
    equation: Equation,
    method: Method,
    setting: float | None,
    seed: int,
    trials: TrialStore[Key, Trial],
    console: Console,
) -> None:
    if (equation.name, method.name, setting, seed) in trials:
        return
    seconds = config.tuning if seed == TUNING_SEED else config.duration
    with trials.interruptible():
        trial = run_one(equation, method, setting, seed, seconds, config.clock)
    trials.keep(trial)
    chosen = "" if setting is None else f", {method.setting} {setting:g}"
    console.print(
        f"{equation.name}, {method.name}{chosen}, seed {seed}: {trial.end:.1e} after {trial.steps} steps"
    )


def run_one(
    equation: Equation,
    method: Method,
    setting: float | None,
    seed: int,
    seconds: float,
    clock: str = "processor",
) -> Trial:
    """One run; only its steps are on the clock."""
    model = equation.make_model(seed)
    optimizer: Any = method.make(model, setting)
    now = CLOCKS[clock]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = equation.loss(model)
        loss.backward()
        return loss

    def evaluate(elapsed: float) -> None:
        passed = sum(mark * seconds <= elapsed for mark in MARKS[len(errors) :])
        if passed:
            errors.extend([_finite(equation.error(model))] * passed)
            losses.extend([_finite(float(equation.loss(model).detach()))] * passed)

    errors: list[float | None] = []
    losses: list[float | None] = []
    elapsed, steps = 0.0, 0
    evaluate(elapsed)
    while elapsed < seconds and errors[-1] is not None:
        if (rate := method.rate(setting, elapsed / seconds)) is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate
        began = now()
        try:
            optimizer.step(closure)
        except KronfacError:
            errors.append(None)
        elapsed += now() - began
        steps += 1
        evaluate(elapsed)
    return Trial(equation.name, method.name, setting, seed, errors, losses, steps)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _settings(config: PhysicsConfig) -> dict[str, Any]:
    """What a trial depends on; more equations or seeds may be asked for later."""
    return {
        "seconds": config.duration,
        "tune_seconds": config.tuning,
        "clock": config.clock,
        "threads": config.threads,
        "kronfac": versions()["kronfac"],
        "equations": {e.name: e.description for e in EQUATIONS.values()},
        "grids": {method.name: list(method.grid) for method in METHODS},
    }
