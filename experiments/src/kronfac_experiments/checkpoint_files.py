"""The checkpoints of a run on the disk: the newest, and the one before it should that one be damaged.

- `checkpoint.pt`: the newest
- `checkpoint.previous.pt`: the one before it
- `checkpoint.damaged.pt`: a newest one that was not used, for people to look at; nothing reads it
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kronfac_experiments.atomic_files import sync_folder, write_atomically
from kronfac_experiments.checkpoint import CheckpointError, NewerFormatError, decode, encode

NEWEST, PREVIOUS, DAMAGED = "checkpoint.pt", "checkpoint.previous.pt", "checkpoint.damaged.pt"


@dataclass(frozen=True)
class Found:
    """The checkpoint to continue from.

    Args:
        state: What was saved.
        file: Its name.
        rejected: Why a newer one is not used; empty if there is none.
    """

    state: dict[str, Any]
    file: str
    rejected: str = ""


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the newest checkpoint; the one that was the newest becomes the previous one."""
    content = encode(state)
    write_atomically(folder / NEWEST, lambda stream: stream.write(content), keep=folder / PREVIOUS)


def load(
    folder: Path, device: torch.device, check: Callable[[dict[str, Any]], None]
) -> Found | None:
    """The newest checkpoint that is whole; None if there is no file at all. Nothing is changed.

    Args:
        folder: That of the run.
        device: For its tensors.
        check: Raises CheckpointError if a state does not go with the other files of the run.

    Raises:
        CheckpointError: there are files, but none can be used.
        NewerFormatError: one can be used by a newer kronfac, so that going on would lose it.
    """
    if not any((folder / name).exists() for name in (NEWEST, PREVIOUS)):
        return None
    reasons: list[str] = []
    for name in (NEWEST, PREVIOUS):
        path = folder / name
        try:
            state = decode(path.read_bytes(), device)
            check(state)
        except FileNotFoundError:
            reasons.append(f"{path} is missing")
        except OSError as error:
            reasons.append(f"{path} can't be read: {error.strerror}")
        except NewerFormatError as error:
            raise NewerFormatError(f"{path} {error}") from error
        except CheckpointError as error:
            reasons.append(f"{path} {str(error).rstrip('.')}")
        else:
            return Found(state, name, "; ".join(reasons))
    raise CheckpointError("; ".join(reasons) + ".")


def adopt(folder: Path, found: Found) -> None:
    """Make it the newest checkpoint, before anything else is written.

    Otherwise the next `save` would put the damaged one in the place of the one that is continued from.
    """
    if found.file == NEWEST:
        return
    if (folder / NEWEST).exists():
        os.replace(folder / NEWEST, folder / DAMAGED)
    os.replace(folder / found.file, folder / NEWEST)
    sync_folder(folder)
