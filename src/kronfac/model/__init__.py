"""The model: its units, and how torch functions use their parameters."""

from kronfac.linalg import Matrices, dot
from kronfac.model.blocks import Blocks
from kronfac.model.find import find_network, find_units
from kronfac.model.functions import SeeFunctions, record_uses
from kronfac.model.layers.linear import LinearAdapter
from kronfac.model.network import Learned, Network, Unit, refuse_changes
from kronfac.model.registry import Adapter, Site, Use, register
from kronfac.model.side_effects import (
    Buffers,
    Kept,
    RandomState,
    hooked,
    remove_hooks,
    replay,
    restore,
    without_hooks,
)
from kronfac.model.uses import Uses

__all__ = [
    "Adapter",
    "Blocks",
    "Buffers",
    "Kept",
    "Learned",
    "LinearAdapter",
    "Matrices",
    "Network",
    "RandomState",
    "SeeFunctions",
    "Site",
    "Unit",
    "Use",
    "Uses",
    "dot",
    "find_network",
    "find_units",
    "hooked",
    "record_uses",
    "refuse_changes",
    "register",
    "remove_hooks",
    "replay",
    "restore",
    "without_hooks",
]
