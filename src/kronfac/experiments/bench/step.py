"""`kronfac bench step`: what a K-FAC step costs, in steps of plain SGD [MG15 §8]."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepConfig:
    """What a K-FAC step costs, in steps of plain SGD."""

    threads: int = 2
    """CPU threads."""


def step_command(config: StepConfig) -> None:
    """Measure, show and write."""
    raise NotImplementedError
