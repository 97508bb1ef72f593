"""What `kronfac bench race` is told."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from kronfac_experiments.bench.race.contests import CONTESTS, contests_named
from kronfac_experiments.bench.race.peers import FIELD, Peer, peers_named
from kronfac_experiments.config import hint
from kronfac_experiments.options import command_line, override

TUNING_SEED = 100
"""A seed of no race: what is best there is not chosen by where it will be judged."""


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    seconds: float
    tune_seconds: float
    seeds: int
    evaluation_cases: int


FULL = Sizes(seconds=300.0, tune_seconds=20.0, seeds=3, evaluation_cases=10_000)
QUICK = Sizes(seconds=20.0, tune_seconds=3.0, seeds=1, evaluation_cases=2000)


@dataclass(frozen=True)
class RaceConfig:
    """Race K-FAC against its peers: seconds, iterations and cases to fixed training errors.

    Every peer is tuned first, six points of a grid for --tune-seconds each, on a seed that is in no race;
    K-FAC is not. All start from the same parameters and are timed without evaluation. The error is the
    smaller one of current and averaged parameters. What has run is not run again; a race that was stopped
    goes on when the same command is given again.
    """

    problems: Annotated[tuple[str, ...], hint("NAME ...", " ".join(CONTESTS))] = ()
    """What to race on."""
    optimizers: Annotated[
        tuple[str, ...], hint("NAME ...", " ".join(peer.name for peer in FIELD))
    ] = ()
    """Who races; kfac always does."""
    seconds: Annotated[float | None, hint("FLOAT", "300; 20 with --quick")] = None
    """Most seconds of optimiser time for each run; it ends earlier at the last target."""
    tune_seconds: Annotated[float | None, hint("FLOAT", "20; 3 with --quick")] = None
    """Seconds of optimiser time for each point of a grid."""
    seeds: Annotated[int | None, hint("INT", "3; 1 with --quick")] = None
    """How many, from 0: initial parameters and mini-batches."""
    evaluation_cases: Annotated[int | None, hint("INT", "10000; 2000 with --quick")] = None
    """Training cases that the error is measured on, the first ones."""
    quick: bool = False
    """One seed, 20 seconds a run, 3 seconds a point: to see it work, not to conclude from."""
    threads: int = 2
    """CPU threads, of every optimizer."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/race, with -quick")] = None
    """Folder for the results."""
    jax_env: Annotated[Path | None, hint("DIR", "in the cache of kronfac")] = None
    """Environment of kfac-jax, which is made with pip if it is not there."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """The table as Markdown, with the command."""

    def __post_init__(self) -> None:
        for name, value in asdict(self.sizes).items():
            if not 0 < value < math.inf:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is positive and finite; got {value}.")
        if self.threads < 1:
            raise ValueError(f"--threads is 1 or more; got {self.threads}.")
        contests_named(self.problems)
        peers_named(self.optimizers)

    @property
    def sizes(self) -> Sizes:
        """As given, or as the setting has them."""
        return override(QUICK if self.quick else FULL, self)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Who races."""
        return peers_named(self.optimizers)

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        return self.run_dir or Path("runs") / ("race-quick" if self.quick else "race")

    @property
    def command(self) -> str:
        """What to type for the same."""
        return command_line("bench race", self, leave_out=("run_dir", "jax_env"))
