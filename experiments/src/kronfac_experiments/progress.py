"""What a training run shows while it runs: a bar in a terminal, now and then a line elsewhere."""

import math
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kronfac_experiments.config import Limits

LINE_EVERY = 10.0
"""Seconds between two lines if there is no terminal."""
RECENT = 20
"""Iterations whose mean time says how long the rest will take: mini-batches may grow."""


class Display:
    """Iteration, error, λ, γ and time left.

    Args:
        limits: What 100 % is.
        console: A terminal or not.
        quiet: Show nothing.
    """

    def __init__(self, limits: Limits, console: Console, quiet: bool = False) -> None:
        self._limits, self._console, self._quiet = limits, console, quiet
        self._error = math.nan
        self._clocks: deque[float] = deque(maxlen=RECENT + 1)
        self._last_line = -math.inf
        self._progress = Progress(
            BarColumn(),
            TextColumn("iteration {task.fields[iteration]}"),
            TextColumn("error {task.fields[error]}"),
            TextColumn("λ {task.fields[damping]}  γ {task.fields[gamma]}"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            transient=True,
        )
        unknown = dict.fromkeys(("iteration", "error", "damping", "gamma", "left"), "–")
        total = 1.0 if limits.iterations or limits.seconds else None
        self._task = self._progress.add_task("", total=total, **unknown)  # type: ignore[arg-type]

    def __enter__(self) -> "Display":
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._progress.stop()

    @property
    def _live(self) -> bool:
        return self._console.is_terminal and not self._quiet

    def update(self, row: dict[str, Any]) -> None:
        """Show the row of an iteration."""
        self._clocks.append(row["seconds"])
        evaluated = "train_error" in row
        if evaluated:
            self._error = row["train_error"]
        if self._quiet:
            return
        if self._live:
            self._progress.update(
                self._task,
                completed=self._share(row),
                iteration=f"{row['iteration']:,}",
                error=number(self._error),
                damping=number(row["lambda"]),
                gamma=number(row["gamma"]),
                left=clock(self.seconds_left(row)),
            )
        elif evaluated and time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            self._console.print(
                f"iteration {row['iteration']:,}: error {number(self._error)}, "
                f"λ {number(row['lambda'])}, γ {number(row['gamma'])}, {row['seconds']:.1f} s, "
                f"{clock(self.seconds_left(row))} left",
                highlight=False,
            )

    def stopping(self) -> None:
        """Say that a signal was heard, as an iteration may take a while."""
        if self._live:
            self._console.print("Saving after this iteration; Ctrl-C again stops at once.")

    def _share(self, row: dict[str, Any]) -> float:
        done = row["iteration"] / (self._limits.iterations or math.inf)
        share = max(done, row["seconds"] / (self._limits.seconds or math.inf))
        return min(1.0, float(share))

    def seconds_left(self, row: dict[str, Any]) -> float | None:
        """Optimiser time to the first limit, as far as it can be known."""
        left = []
        if self._limits.seconds is not None:
            left.append(self._limits.seconds - row["seconds"])
        if self._limits.iterations is not None and len(self._clocks) > 1:
            pace = (self._clocks[-1] - self._clocks[0]) / (len(self._clocks) - 1)
            left.append(pace * (self._limits.iterations - row["iteration"]))
        return max(0.0, min(left)) if left else None


def number(value: float | None) -> str:
    """Four digits."""
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"


def clock(seconds: float | None) -> str:
    """h:mm:ss."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
