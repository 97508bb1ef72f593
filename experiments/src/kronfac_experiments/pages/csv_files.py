"""Rows of a dataclass as a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any


def write_csv(rows: Sequence[Any], path: Path) -> Path:
    """Write rows of one dataclass; what is None is left empty. Returns the path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(rows[0])])
        writer.writerows(["" if v is None else v for v in astuple(row)] for row in rows)
    return path
