"""Files that are replaced whole, and locks on files that end with their process, however it ends.

At any moment there is the old file or the new one. `flock` belongs to the open file, so the operating
system releases it also after kill -9. Windows has no such lock: there nothing is locked.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


def lock(stream: IO[bytes]) -> None:
    """Lock the file until it is closed, as soon as nobody else does."""
    if sys.platform != "win32":
        fcntl.flock(stream, fcntl.LOCK_EX)


def try_lock(stream: IO[bytes]) -> bool:
    """Lock the file until it is closed; False if it is locked already, by any process or stream."""
    if sys.platform != "win32":
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file: write beside it, sync, rename; nothing is left beside it if that fails."""
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        with beside.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: a file is safe only when its name is."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed `write_atomically` left; no other process may be writing there."""
    for path in folder.iterdir():
        if is_unfinished(path):
            path.unlink()


def is_unfinished(path: Path) -> bool:
    """Whether a killed `write_atomically` left it."""
    return path.name.startswith(".") and path.name.endswith(".unfinished")


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))
