"""Files that are replaced whole: at any moment there is the old one or the new one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


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
    if os.name == "posix":  # the name is safe only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def is_unfinished(path: Path) -> bool:
    """Whether a killed `write_atomically` left it."""
    return path.name.startswith(".") and path.name.endswith(".unfinished")


def write_json(path: Path, content: object) -> None:
    """Replace a JSON file."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))
