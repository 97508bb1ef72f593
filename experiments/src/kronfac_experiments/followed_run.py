"""The run directory as the ranks other than 0 have it: they read what rank 0 writes."""

from typing import Any

from kronfac_experiments import checkpoint_files
from kronfac_experiments.run_directory import RunDirectory


class FollowedRun(RunDirectory):
    """A run that another process writes: nothing is locked, and nothing written."""

    def __enter__(self) -> "FollowedRun":
        return self

    def check_new(self) -> None:
        """Rank 0 does: it may have begun."""

    def start(self, iteration: int, found: checkpoint_files.Found | None) -> None:
        """Rank 0 does."""

    def log(self, row: dict[str, Any]) -> None:
        """Rank 0 does."""

    def snapshot(self, iteration: int, originals: Any, reconstructions: Any) -> None:
        """Rank 0 does."""

    def save(self, state: dict[str, Any]) -> None:
        """Rank 0 does."""

    def diverged(self, message: str) -> None:
        """Rank 0 does."""
