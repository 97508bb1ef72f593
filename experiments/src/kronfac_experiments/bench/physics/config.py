"""What `kronfac bench physics` is told."""

import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import torch

from kronfac_experiments.bench.physics.equations import Equation, equations_named
from kronfac_experiments.bench.physics.methods import Method, methods_named
from kronfac_experiments.config import hint
from kronfac_experiments.machine import machine
from kronfac_experiments.options import at_least

TUNING_SEED = 100
"""Settings are chosen on another start than those that count."""


@dataclass(frozen=True)
class PhysicsConfig:
    """K-FAC beside Adam, SOAP and L-BFGS on differential equations with known solutions, in equal seconds.

    What counts is the relative L² error against the solution, on points that are not trained on. The
    learning rates of Adam and SOAP and the history of L-BFGS are the best of five and of four, on another
    start. K-FAC is not tuned. What has run is not run again; other processes may run other equations in the
    same folder, and a last command with all of them writes the page.
    """

    equations: Annotated[tuple[str, ...], hint("NAME ...", "all five")] = ()
    """Only these: poisson-2 poisson-5 heat burgers reaction."""
    methods: Annotated[tuple[str, ...], hint("NAME ...", "all four")] = ()
    """Only these: kfac lbfgs soap adam."""
    seconds: Annotated[float | None, hint("FLOAT", "120; 2 with --quick")] = None
    """Seconds of optimiser time for each run."""
    tune_seconds: Annotated[float | None, hint("FLOAT", "a sixth of --seconds")] = None
    """Seconds for each setting that is tried."""
    seeds: Annotated[int | None, hint("INT", "3; 1 with --quick")] = None
    """How many, from 0: initial parameters."""
    clock: Literal["wall", "processor"] = "wall"
    """Seconds that pass, or those of the processor alone, for a machine that others use too."""
    quick: bool = False
    """Two seconds a run and one seed: to see it work, not to conclude from."""
    threads: int = 1
    """CPU threads; the networks are small."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Markdown file to write, with a picture beside it."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-physics, with -quick")] = None
    """Folder for the results."""

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.duration), ("tune-seconds", self.tuning)):
            if not 0 < value < math.inf:
                raise ValueError(f"--{name} is positive and finite; got {value}.")
        if not 1 <= self.starts <= TUNING_SEED:
            raise ValueError(f"--seeds is 1 to {TUNING_SEED}; got {self.seeds}.")
        at_least(1, threads=self.threads)
        if self.output is not None and self.output.suffix != ".md":
            raise ValueError(f"--output is a .md file; got {self.output}.")
        equations_named(self.equations)
        methods_named(self.methods)

    @property
    def solvers(self) -> tuple[Method, ...]:
        """The methods."""
        return methods_named(self.methods)

    @property
    def chosen(self) -> tuple[Equation, ...]:
        """The equations."""
        return equations_named(self.equations)

    @property
    def duration(self) -> float:
        """Seconds of a run."""
        usual = 2.0 if self.quick else 120.0
        return usual if self.seconds is None else self.seconds

    @property
    def tuning(self) -> float:
        """Seconds of a run that tunes."""
        return self.duration / 6 if self.tune_seconds is None else self.tune_seconds

    @property
    def starts(self) -> int:
        """How many seeds."""
        usual = 1 if self.quick else 3
        return usual if self.seeds is None else self.seeds

    @property
    def folder(self) -> Path:
        """Where the results are."""
        return self.run_dir or Path("runs") / f"bench-physics{'-quick' if self.quick else ''}"

    @property
    def described(self) -> str:
        """What the numbers depend on, above every table."""
        return (
            f"{self.duration:g} s of optimiser time a run ({self.clock} clock), {self.tuning:g} s for each "
            f"setting that was tried, {self.starts} seed(s) from 0, {self.threads} thread(s), float64, "
            f"kronfac {version('kronfac')}, torch {torch.__version__}, "
            f"{machine()['processor'] or 'unknown processor'}."
        )
