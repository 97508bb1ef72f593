"""The network: its units, how modules use them, and what the user's code did with it."""

from kronfac.network.adapter import Adapter, Use, register
from kronfac.network.blocks import Blocks
from kronfac.network.find import Other, Site, find_units
from kronfac.network.functions import SeeFunctions, record_uses
from kronfac.network.hooks import record
from kronfac.network.layers.linear import LinearAdapter
from kronfac.network.learned import LearnedState, check_moments
from kronfac.network.network import Network
from kronfac.network.program import Batch, LossCall, ModelCall, Pass, Ref
from kronfac.network.side_effects import Buffers, Kept, RandomState, hooked, replay, restore
from kronfac.network.standing import StandingRecorder
from kronfac.network.standing_hooks import remove_hooks, without_hooks
from kronfac.network.subset import sizes, subsets, terms_of_examples
from kronfac.network.unit import Unit
from kronfac.network.uses import Uses
from kronfac.vector import Matrices, dot

__all__ = [
    "Adapter",
    "Batch",
    "Blocks",
    "Buffers",
    "Kept",
    "LearnedState",
    "LinearAdapter",
    "LossCall",
    "Matrices",
    "ModelCall",
    "Network",
    "Other",
    "Pass",
    "RandomState",
    "Ref",
    "SeeFunctions",
    "Site",
    "StandingRecorder",
    "Unit",
    "Use",
    "Uses",
    "check_moments",
    "dot",
    "find_units",
    "hooked",
    "record",
    "record_uses",
    "register",
    "remove_hooks",
    "replay",
    "restore",
    "sizes",
    "subsets",
    "terms_of_examples",
    "without_hooks",
]
