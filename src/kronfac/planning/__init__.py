"""What K-FAC will do with a network, said before the first step: blocks, memory, cost, engine.

`make.py`, which counts, is imported when the first plan is made: few programs ask for one.
"""

from kronfac.planning.example import record_example, untouched
from kronfac.planning.plan import Memory, Plan, Row
from kronfac.planning.world import World, WorldPlan

__all__ = [
    "Memory",
    "Plan",
    "Row",
    "World",
    "WorldPlan",
    "record_example",
    "untouched",
]
