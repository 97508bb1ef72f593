"""What comparisons of the closure's gradient with what K-FAC sees have found so far, as it is saved.

Without it a resumed run would compare its first mini-batch as if it were the first of all: the factor of a
step that was clipped would be taken for that of the loss.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    scale: float = 1.0
    """By what factor the closure's gradient is larger than that of the loss calls."""
    others: tuple[str, ...] = ()
    """The parameters whose gradient is another, whatever the factor."""
    unseen: tuple[str, ...] = ()
    """The parameters that have uses which K-FAC does not see."""


@dataclass(frozen=True)
class GradientMemory:
    """What is known of the gradients of a loop or a closure."""

    compared: bool = False
    """Whether one was compared."""
    zeroes_in_place: bool = False
    """Whether the last one that was compared was written to a gradient before it, which had been zeroed."""
    adds: bool = False
    """Whether gradients were added to those before them, so that there is nothing to compare with."""
    follows_returned: bool = False
    """Whether the loss is scaled as the returned one is, by a GradScaler."""
    last: Verdict = Verdict()
    """What was found last, of gradients that were not added to others."""
    scale: float = 1.0
    """What the gradients of all steps are multiplied by."""
    scales: tuple[float | None, float | None] = (None, None)
    """What was found of fresh gradients, the last two; None for those that there were not yet."""

    @property
    def clips(self) -> bool:
        """Whether the factor differs from step to step, as clipping makes it."""
        earlier, last = self.scales
        return earlier is not None and earlier != last

    @property
    def undecided(self) -> bool:
        """Whether a factor was seen once: it is looked at twice, as clipping has another one each time."""
        earlier, last = self.scales
        return earlier is None and last not in (None, 1.0)
