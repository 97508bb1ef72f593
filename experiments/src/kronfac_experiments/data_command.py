"""`kronfac data`: which data files are on this machine, and getting those that are not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

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
}
"""The files of each data set; of several in a row one is enough, and the last can be downloaded."""
GENERATED = "curves"


class DataCommandError(DataError):
    """Files are missing or damaged, and the command was to find that out."""

    exit_code = 1


@dataclass(frozen=True)
class DataConfig:
    """List, fetch or verify the data sets: mnist, faces, shakespeare, curves.

    MNIST is also for mnist16; CURVES is generated. Files are looked for in the folder that the environment
    variable KRONFAC_DATA names, then in the user's cache folder, which is where they are downloaded to.
    """

    action: Annotated[
        Literal["list", "fetch", "verify"],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="list|fetch|verify"),
    ] = "list"
    """list what is where; fetch what is missing; verify SHA-256 sums and fail if one is wrong."""
    sets: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="SET", help_behavior_hint="(default: all)"),
    ] = ()
    """mnist, faces, shakespeare or curves."""

    def __post_init__(self) -> None:
        known = (GENERATED, *SETS)
        for name in self.sets:
            if name not in known:
                raise ValueError(f"The data sets are {', '.join(known)}; got {name!r}.")


@dataclass(frozen=True)
class FileState:
    """A file of a data set on this machine."""

    data_set: str
    file: DataFile
    path: Path | None
    """None if it is not there, or is damaged."""
    problem: str | None
    """What is wrong with it."""


def file_states(sets: tuple[str, ...]) -> list[FileState]:
    """Every file of the data sets, each read and its checksum compared."""
    states = []
    for name in sets or tuple(SETS):
        for alternatives in SETS.get(name, ()):
            found = [_state(name, file) for file in alternatives]
            here = [state for state in found if state.path is not None]
            damaged = [state for state in found if state.problem is not None]
            states += damaged or here[:1] or found[-1:]
    return states


def _state(data_set: str, file: DataFile) -> FileState:
    try:
        return FileState(data_set, file, find(file), None)
    except DataError as error:
        return FileState(data_set, file, None, str(error))


def data_command(config: DataConfig) -> None:
    """Do it, and show the table."""
    console = Console(soft_wrap=True, highlight=False)
    before = file_states(config.sets)
    states = before
    if config.action == "fetch":
        for state in before:
            if state.problem is not None:
                raise DataCommandError(state.problem)
            if state.path is None:
                console.print(f"Fetching {state.file.path} …")
                fetch(state.file)
        states = file_states(config.sets)
    console.print(_table(states, curves=not config.sets or GENERATED in config.sets))
    damaged = [state for state in states if state.problem is not None]
    missing = [state for state in states if state.path is None and state.problem is None]
    if config.action == "verify" and (damaged or missing):
        said = [str(state.problem) for state in damaged]
        if missing:
            names = ", ".join(state.file.path for state in missing)
            said.append(f"Missing: {names}; kronfac data fetch downloads what has a mirror.")
        raise DataCommandError(" ".join(said))
    if config.action == "fetch":
        fetched = sum(state.path is None for state in before)
        console.print(f"Wrote {fetched} files to {default_cache()}.")
    elif config.action == "verify":
        console.print(f"All {len(states)} files have the right SHA-256. Wrote nothing.")
    else:
        console.print(f"Folders: ${DATA_VARIABLE}, if set, then {default_cache()}. Wrote nothing.")


def _table(states: list[FileState], curves: bool) -> str:
    rows = [(GENERATED, "generated", "–", "always there", "–")] if curves else []
    for state in states:
        verdict = "verified" if state.path else "damaged" if state.problem else "missing"
        size = f"{state.path.stat().st_size / 1e3:,.0f} kB" if state.path else "–"
        where = str(state.path.parent) if state.path else "–"
        rows.append((state.data_set, state.file.path, size, verdict, where))
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, columns, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
