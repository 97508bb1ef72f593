"""The parameter group of KFAC, which has no learning rate and says so to whatever asks for one."""

from typing import Any

from kronfac.errors import LearningRateError

LEARNING_RATE = ("lr", "initial_lr")
"""What schedules of learning rates read and write."""


class ParameterGroup(dict[str, Any]):
    """A dictionary that explains why it has no `"lr"`."""

    def __missing__(self, key: str) -> Any:
        if key in LEARNING_RATE:
            raise _error(key)
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in LEARNING_RATE:
            raise _error(key)
        super().__setitem__(key, value)


def _error(key: str) -> LearningRateError:
    return LearningRateError(
        f"KFAC has no learning rate, so there is no {key!r} in its parameter group: its quadratic model "
        "finds the length of every step. Leave the schedule out; for steps of a fixed length use "
        "KFAC(..., step_size=RawStep(alpha)). A learning rate comes with a later release."
    )
