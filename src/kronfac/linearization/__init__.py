"""The network around θ: f, J v and Jᵀ r, by hand for perceptrons, by torch for the rest [MG15 App. C]."""

from kronfac.linearization.base import Linearization
from kronfac.linearization.by_hand import ByHand, Trace, trace_of
from kronfac.linearization.traced import Traced
from kronfac.network import Network, Pass

__all__ = ["ByHand", "Linearization", "Trace", "Traced", "linearize"]


def linearize(network: Network, part: Pass) -> Linearization:
    """The network around θ on one micro-batch."""
    trace = trace_of(network, part)
    return Traced(network, part) if trace is None else ByHand(part, trace)
