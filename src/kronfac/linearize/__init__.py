"""The network around θ: f, J v and Jᵀ r, by hand for perceptrons, by torch for the rest [MG15 App. C]."""

from kronfac.linearize.base import Linearization, Traced
from kronfac.linearize.by_hand import ByHand, Trace, trace_of
from kronfac.linearize.explicit import Explicit, Linearizer, can_be_explicit, linearize

__all__ = [
    "ByHand",
    "Explicit",
    "Linearization",
    "Linearizer",
    "Trace",
    "Traced",
    "can_be_explicit",
    "linearize",
    "trace_of",
]
