"""Several processes: who they are, what they tell each other, and what can't be trained in them."""

from kronfac.distributed.holders import Holders
from kronfac.distributed.packing import Packed, Part
from kronfac.distributed.reduction import Reduction, Tally
from kronfac.distributed.spread import HERE, Place, Spread
from kronfac.distributed.whole_state import WholeState
from kronfac.distributed.world import ALONE, Phase, Processes, Ranks
from kronfac.distributed.wrappers import (
    averages_gradients,
    fully_sharded,
    inner_model,
    refuse_distributed,
    reshard,
)

__all__ = [
    "ALONE",
    "HERE",
    "Holders",
    "Packed",
    "Part",
    "Phase",
    "Place",
    "Processes",
    "Ranks",
    "Reduction",
    "Spread",
    "Tally",
    "WholeState",
    "averages_gradients",
    "fully_sharded",
    "inner_model",
    "refuse_distributed",
    "reshard",
]
