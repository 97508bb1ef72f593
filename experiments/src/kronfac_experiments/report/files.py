"""The files that a page is made of, and the one that it becomes."""

import os
from importlib import resources
from pathlib import Path

from kronfac_experiments.report.runs import ReportError


def packaged(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def write_page(page: str, output: Path) -> Path:
    """Write it and return where it is; an earlier one is replaced at once or not at all.

    Raises:
        ReportError: it can't be written there.
    """
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # A folder's name may hold bytes that are no text.
        unfinished.write_bytes(page.encode("utf-8", errors="replace"))
        os.replace(unfinished, output)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ReportError(
            f"The report cannot be written to '{output}': {error.strerror}. "
            "Name another file with --output."
        ) from error
    return output
