"""Tiny figures, shared by their tests."""

import contextlib
import csv
import io
from pathlib import Path

from kronfac_experiments.figures import FigureConfig, make_figure


def figure(number: int, folder: Path, **options: object) -> tuple[list[Path], str]:
    """The paths of a figure of the quick setting, and what was said."""
    usual = {"quick": True, "output": folder / "figures", "runs": folder / "runs", "threads": 1}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        paths = make_figure(FigureConfig(number, **usual | options))
    return paths, said.getvalue()


def table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


class Made:
    """Figures, made once for all tests of a module.

    Args:
        folder: Where their files and runs are.
        cases: Option of those that are not trained.
    """

    def __init__(self, folder: Path, cases: int | None = None) -> None:
        self.folder = folder / "figures"
        self._runs, self._cases = folder, cases
        self._made: dict[int, tuple[list[Path], str]] = {}

    def __call__(self, number: int) -> tuple[list[Path], str]:
        """The paths, and what was said."""
        if number not in self._made:
            cases = self._cases if number < 7 else None
            self._made[number] = figure(number, self._runs, cases=cases)
        return self._made[number]

    def rows(self, number: int) -> list[dict[str, str]]:
        return table(self(number)[0][2])

    def values(self, number: int) -> dict[str, float | None]:
        rows = self.rows(number)
        return {row["quantity"]: float(row["value"]) if row["value"] else None for row in rows}
