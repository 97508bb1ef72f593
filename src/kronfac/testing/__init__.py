"""Conformance kits: what a rule of your own has to satisfy."""

from kronfac.testing.rules import (
    check_damping_rule,
    check_gamma_rule,
    check_step_rule,
    measurements,
)

__all__ = ["check_damping_rule", "check_gamma_rule", "check_step_rule", "measurements"]
