"""Training in several processes: everything about ranks, behind `World`."""

from kronfac.distributed.portion import HERE, OwnPart, Portion, fingerprint, gather_parts
from kronfac.distributed.whole_state import WholeState
from kronfac.distributed.world import ALONE, Processes, World
from kronfac.distributed.wrappers import averages_gradients, inner_model, refuse_distributed

__all__ = [
    "ALONE",
    "HERE",
    "OwnPart",
    "Portion",
    "Processes",
    "WholeState",
    "World",
    "averages_gradients",
    "fingerprint",
    "gather_parts",
    "inner_model",
    "refuse_distributed",
]
