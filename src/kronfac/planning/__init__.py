"""What K-FAC will do with a network, said before the first step: blocks, memory, cost, engine."""

from kronfac.planning.example import record_example, untouched
from kronfac.planning.make import make_plan
from kronfac.planning.plan import Memory, Plan, Row

__all__ = ["Memory", "Plan", "Row", "make_plan", "record_example", "untouched"]
