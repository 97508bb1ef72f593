"""`kronfac data`: which data files are on this machine, and getting those that are not."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from kronfac_experiments.data import faces, mnist, shakespeare
from kronfac_experiments.data.fetch import (
    DATA_VARIABLE,
    DataError,
    DataFile,
    default_cache,
    fetch,
    find,
)

SETS: dict[str, tuple[tuple[DataFile, ...], ...]] = {
    "mnist": (
        (mnist.TRAIN_IMAGES,),
        (mnist.TRAIN_LABELS,),
        (mnist.TEST_IMAGES,),
        (mnist.TEST_LABELS,),
    ),
    "faces": ((faces.UPRIGHT, faces.ORIGINAL),),
    "shakespeare": ((shakespeare.PACKED, shakespeare.TEXT),),
    "curves": (),
}
"""The files of each data set; of several in a row one is enough, and the last can be downloaded."""


@dataclass(frozen=True)
class DataConfig:
    """List or fetch the data sets: mnist, faces, shakespeare, curves.

    MNIST is also for mnist16; CURVES is generated. Files are looked for in the folder that the environment
    variable KRONFAC_DATA names, then in the user's cache folder, which is where they are downloaded to.
    """

    action: Annotated[
        Literal["list", "fetch"],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="list|fetch"),
    ] = "list"
    """list what is where, by its SHA-256 sum; fetch what is missing."""
    sets: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="SET", help_behavior_hint="(default: all)"),
    ] = ()
    """mnist, faces, shakespeare or curves."""

    def __post_init__(self) -> None:
        for name in self.sets:
            if name not in SETS:
                raise ValueError(f"The data sets are {', '.join(SETS)}; got {name!r}.")


def data_command(config: DataConfig) -> None:
    """Do it, and show the table."""
    console = Console(soft_wrap=True, highlight=False)
    table = Table("data set", "file", "state", "folder", box=None)
    for name in config.sets or SETS:
        if not SETS[name]:
            table.add_row(name, "generated", "always there", "–")
        for files in SETS[name]:
            if config.action == "fetch" and not any(map(find, files)):
                console.print(f"Fetching {files[-1].path} …")
                fetch(files[-1])
            table.add_row(name, *_state(files))
    console.print(table)
    console.print(f"Folders: ${DATA_VARIABLE}, if set, then {default_cache()}.")


def _state(files: tuple[DataFile, ...]) -> tuple[str, str, str]:
    """The file that is there, or the one that can be downloaded, its state and its folder."""
    for file in files:
        try:
            path = find(file)
        except DataError:
            return file.path, "damaged", "–"
        if path is not None:
            return file.path, "verified", str(path.parent)
    return files[-1].path, "missing", "–"
