"""The network around θ: f, J v and Jᵀ r, by hand for perceptrons, by torch for the rest [MG15 App. C]."""

from kronfac.linearization.base import Linearization
from kronfac.linearization.by_hand import ByHand, Trace, trace_of
from kronfac.linearization.explicit import Explicit, Linearizer, can_be_explicit, linearize
from kronfac.linearization.traced import Traced

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
