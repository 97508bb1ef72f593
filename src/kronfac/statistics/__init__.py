"""Second moments of inputs and output gradients, from the rows that the closure used [MG15 §5]."""

from kronfac.statistics.capture import capture
from kronfac.statistics.chain import chain_order
from kronfac.statistics.estimator import estimate
from kronfac.statistics.fisher import EmpiricalFisher, ExactFisher, Fisher, SampledFisher
from kronfac.statistics.recorder import Recorder

__all__ = [
    "EmpiricalFisher",
    "ExactFisher",
    "Fisher",
    "Recorder",
    "SampledFisher",
    "capture",
    "chain_order",
    "estimate",
]
