"""What `kronfac bench race` is told."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from kronfac_experiments.bench.race.contests import CONTESTS, contests_named
from kronfac_experiments.bench.race.networks.problems import ALL, NETWORKS, networks_named
from kronfac_experiments.bench.race.networks.racers import racers_named
from kronfac_experiments.bench.race.peers import FIELD, Peer, peers_named
from kronfac_experiments.config import hint
from kronfac_experiments.options import at_least, command_line, override

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
NETWORKS_FULL = replace(FULL, seconds=60.0, tune_seconds=12.0)
NETWORKS_QUICK = replace(QUICK, seconds=10.0, tune_seconds=2.0)


@dataclass(frozen=True)
class RaceConfig:
    """Race K-FAC against its peers: seconds, iterations and cases to fixed training errors.

    Every peer is tuned first, six points of a grid for --tune-seconds each, on a seed that is in no race;
    K-FAC is not. All start from the same parameters and are timed without evaluation. The error is the
    smaller one of current and averaged parameters. What has run is not run again; a race that was stopped
    goes on when the same command is given again.

    Networks (cnn resnet conv_autoencoder gpt lstm tabular, or networks for all of them) race by themselves:
    training loss and validation metric in equal --seconds, runs of a seed taking turns. Other processes may
    race on other networks in the same folder; a last command with all of them writes the page.
    """

    problems: Annotated[tuple[str, ...], hint("NAME ...", " ".join(CONTESTS))] = ()
    """What to race on, or networks, which is cnn resnet conv_autoencoder gpt lstm tabular."""
    optimizers: Annotated[
        tuple[str, ...],
        hint(
            "NAME ...",
            " ".join(peer.name for peer in FIELD)
            + "; on networks "
            + " ".join(racer.name for racer in racers_named(())),
        ),
    ] = ()
    """Who races; kfac always does."""
    seconds: Annotated[
        float | None, hint("FLOAT", "300; 20 with --quick; on networks 60 and 10")
    ] = None
    """Most seconds of optimiser time for each run; it ends earlier at the last target, if there is one."""
    tune_seconds: Annotated[
        float | None, hint("FLOAT", "20; 3 with --quick; on networks 12 and 2")
    ] = None
    """Seconds of optimiser time for each point of a grid."""
    seeds: Annotated[int | None, hint("INT", "3; 1 with --quick")] = None
    """How many, from 0: initial parameters and mini-batches."""
    evaluation_cases: Annotated[
        int | None, hint("INT", "10000; 2000 with --quick; on networks 64 to 5000")
    ] = None
    """Training cases that the error is measured on, the first ones; on networks as many for validation."""
    batch: Annotated[int | None, hint("INT", "that of the network")] = None
    """Networks: examples in a mini-batch of first-order methods."""
    kfac_batch: Annotated[int | None, hint("INT", "that of the network")] = None
    """Networks: examples in a mini-batch of K-FAC."""
    clock: Literal["wall", "processor"] = "wall"
    """Networks: seconds that pass, or those of the processor alone, for a machine that others use too."""
    quick: bool = False
    """One seed and a few seconds: to see it work, not to conclude from."""
    threads: int = 2
    """CPU threads, of every optimizer."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/race or race-networks, with -quick")] = None
    """Folder for the results."""
    jax_env: Annotated[Path | None, hint("DIR", "in the cache of kronfac")] = None
    """Environment of kfac-jax, which is made with pip if it is not there."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """The table as Markdown, with the command; on networks with a picture and a .csv file beside it."""

    def __post_init__(self) -> None:
        for name, value in asdict(self.sizes).items():
            if not 0 < value < math.inf:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is positive and finite; got {value}.")
        at_least(1, threads=self.threads)
        for name in ("batch", "kfac_batch"):
            value = getattr(self, name)
            if value is not None:
                at_least(1, **{name: value})
                if not self.on_networks:
                    raise ValueError(
                        f"--{name.replace('_', '-')} is for networks; name them with --problems."
                    )
        if self.on_networks:
            self._check_networks()
        else:
            contests_named(self.problems)
            peers_named(self.optimizers)

    def _check_networks(self) -> None:
        others = [name for name in self.problems if name in CONTESTS]
        if others:
            raise ValueError(
                f"Networks race by themselves: give {' '.join(others)} to another command."
            )
        if self.sizes.seeds > TUNING_SEED:
            raise ValueError(f"--seeds is {TUNING_SEED} at the most; got {self.sizes.seeds}.")
        if self.output is not None and self.output.suffix != ".md":
            raise ValueError(f"--output is a .md file; got {self.output}.")
        networks_named(self.problems)
        racers_named(self.optimizers)

    @property
    def on_networks(self) -> bool:
        """Whether one of the problems is a network."""
        return any(name in (ALL, *NETWORKS) for name in self.problems)

    @property
    def sizes(self) -> Sizes:
        """As given, or as the setting has them."""
        if self.on_networks:
            return override(NETWORKS_QUICK if self.quick else NETWORKS_FULL, self)
        return override(QUICK if self.quick else FULL, self)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Who races."""
        return peers_named(self.optimizers)

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        name = "race-networks" if self.on_networks else "race"
        return self.run_dir or Path("runs") / (f"{name}-quick" if self.quick else name)

    @property
    def command(self) -> str:
        """What to type for the same."""
        return command_line("bench race", self, leave_out=("run_dir", "jax_env"))
