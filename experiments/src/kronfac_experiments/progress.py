"""What a training run shows while it runs: a bar in a terminal, now and then a line elsewhere."""

import math
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kronfac_experiments.config import Limits

LINE_EVERY = 10.0
"""Seconds between two lines if there is no terminal."""


class Display:
    """Iteration, error, λ and γ, and in a terminal the time left.

    Args:
        limits: What 100 % is.
        console: A terminal or not.
        quiet: Show nothing.
    """

    def __init__(self, limits: Limits, console: Console, quiet: bool = False) -> None:
        self._limits, self._console, self._quiet = limits, console, quiet
        self._error = math.nan
        self._last_line = -math.inf
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        total = 1.0 if limits.iterations or limits.seconds else None
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def update(self, row: dict[str, Any]) -> None:
        """Show the row of an iteration."""
        evaluated = "train_error" in row
        self._error = row.get("train_error", self._error)
        text = (
            f"iteration {row['iteration']:,}: error {number(self._error)}, "
            f"λ {number(row['lambda'])}, γ {number(row['gamma'])}"
        )
        self._progress.update(self._task, completed=self._share(row), description=text)
        silent = self._quiet or self._console.is_terminal
        if evaluated and not silent and time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            self._console.print(f"{text}, {row['seconds']:.1f} s", highlight=False)

    def stopping(self) -> None:
        """Say that a signal was heard, as an iteration may take a while."""
        if self._console.is_terminal and not self._quiet:
            self._console.print("Saving after this iteration; Ctrl-C again stops at once.")

    def _share(self, row: dict[str, Any]) -> float:
        done = row["iteration"] / (self._limits.iterations or math.inf)
        return min(1.0, float(max(done, row["seconds"] / (self._limits.seconds or math.inf))))


def number(value: float | None) -> str:
    """Four digits."""
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"


def clock(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
