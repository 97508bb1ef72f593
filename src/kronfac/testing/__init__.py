"""Conformance kits: what rules, likelihoods, adapters and blocks of your own have to satisfy."""

from kronfac.testing.adapters import check_adapter
from kronfac.testing.blocks import check_block
from kronfac.testing.likelihoods import check_likelihood
from kronfac.testing.rules import (
    check_damping_rule,
    check_gamma_rule,
    check_step_rule,
    check_units,
    measurements,
)

__all__ = [
    "check_adapter",
    "check_block",
    "check_damping_rule",
    "check_gamma_rule",
    "check_likelihood",
    "check_step_rule",
    "check_units",
    "measurements",
]
