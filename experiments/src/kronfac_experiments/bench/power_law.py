"""How fast something grows."""

import math
from collections.abc import Sequence

import numpy as np


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of y ∝ xᵖ, by least squares of log y on log x; NaN for fewer than two points."""
    if len(set(x)) < 2 or min(y) <= 0:
        return math.nan
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def standard_error(x: Sequence[float], y: Sequence[float]) -> float:
    """Standard error of that p, from how far the points are from the line; NaN for fewer than three."""
    if len(set(x)) < 3 or min(y) <= 0:
        return math.nan
    covariance = np.polyfit(np.log(x), np.log(y), 1, cov="unscaled")[1]
    slope, intercept = np.polyfit(np.log(x), np.log(y), 1)
    left = np.log(y) - slope * np.log(x) - intercept
    return float(np.sqrt(covariance[0, 0] * (left @ left) / (len(x) - 2)))
