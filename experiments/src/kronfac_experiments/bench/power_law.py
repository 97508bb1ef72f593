"""How fast something grows."""

import math
from collections.abc import Sequence

import numpy as np


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of y ∝ xᵖ, by least squares of log y on log x; NaN for fewer than two points."""
    if len(set(x)) < 2 or min(y) <= 0:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
