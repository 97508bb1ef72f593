"""The numbers that a field of a saved dataclass may hold, as part of its type hint."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """The numbers that a field may hold; without one, all that are finite."""

    least: float = -math.inf
    above: bool = False
    """Whether `least` itself is left out."""
    infinite: bool = False
    nan: bool = False
    """Whether infinity and NaN are numbers like others."""

    def __contains__(self, number: float) -> bool:
        if math.isnan(number) or number == math.inf:
            return self.nan if math.isnan(number) else self.infinite
        return (
            number > self.least if self.above or self.least == -math.inf else number >= self.least
        )

    def __str__(self) -> str:
        bound = f"{'above' if self.above else 'at least'} {self.least:g}"
        parts = [] if self.infinite else ["finite"]
        return " and ".join(parts if self.least == -math.inf else [*parts, bound])


Count = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
