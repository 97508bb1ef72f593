"""Every rule passes the kit that users have for theirs, and the kit finds what it is there to find."""

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest

from kronfac import (
    AdaptiveDamping,
    AdaptiveGamma,
    ConjugateGradients,
    FixedDamping,
    FixedGamma,
    GammaSearch,
    LevenbergMarquardtRule,
    QuadraticModel,
    RawStep,
)
from kronfac.extend import DampingRule, DampingState, GammaRule, GammaState, LongMemory
from kronfac.testing import check_damping_rule, check_gamma_rule, check_step_rule, check_units


@pytest.mark.parametrize(
    "rule",
    [
        AdaptiveGamma(),
        AdaptiveGamma(strength=None, minimum=0.1),
        GammaSearch(),
        FixedGamma(),
        FixedGamma(0.3),
    ],
    ids=str,
)
def test_rules_for_gamma(rule):
    check_gamma_rule(rule)


@pytest.mark.parametrize(
    "rule",
    [
        AdaptiveDamping(),
        AdaptiveDamping(0.3, search=None),
        LevenbergMarquardtRule(),
        FixedDamping(0.0),
    ],
    ids=str,
)
def test_rules_for_lambda(rule):
    check_damping_rule(rule)


@pytest.mark.parametrize(
    "rule",
    [
        QuadraticModel(bounded=False, memory=None),
        QuadraticModel(),
        QuadraticModel(momentum=False, bounded=False, memory=None),
        ConjugateGradients(),
        RawStep(),
    ],
    ids=str,
)
def test_rules_for_the_step(rule):
    check_step_rule(rule)


@pytest.mark.parametrize(
    "rule",
    [
        AdaptiveGamma(),
        AdaptiveGamma(strength=None),
        FixedGamma(),
        AdaptiveDamping(),
        LevenbergMarquardtRule(),
    ],
    ids=str,
)
def test_rules_that_do_not_depend_on_units(rule):
    check_units(rule)


@pytest.mark.parametrize(
    "rule", [FixedGamma(0.3), GammaSearch(), AdaptiveGamma(minimum=0.1)], ids=str
)
def test_rules_that_do(rule):
    """`presets.paper()` keeps the paper's absolute bounds."""
    with pytest.raises(AssertionError, match="γ = "):
        check_units(rule)


@dataclass(frozen=True)
class Negative(GammaRule[GammaState]):
    def init(self, m):
        return GammaState(1.0)

    def candidates(self, state, m):
        return (1.0 - m.weight_decay,)


@dataclass(frozen=True)
class Impure(GammaRule[GammaState]):
    counter: itertools.count = field(default_factory=lambda: itertools.count(1))

    def init(self, m):
        return GammaState(1.0)

    def candidates(self, state, m):
        return (float(next(self.counter)),)


@dataclass(frozen=True)
class SetState(GammaState):
    seen: frozenset = frozenset()


@dataclass(frozen=True)
class Unsaved(GammaRule[SetState]):
    def init(self, m):
        return SetState(1.0)

    def candidates(self, state, m):
        return (1.0,)


class Number(float):
    """What the saved state would need a class for."""


@dataclass(frozen=True)
class Subclass(GammaRule[GammaState]):
    def init(self, m):
        return GammaState(Number(1.0))

    def candidates(self, state, m):
        return (1.0,)


@dataclass(frozen=True)
class Unbounded(DampingRule[DampingState]):
    def init(self, m):
        return DampingState(1.0)

    def update(self, state, m):
        return replace(state, lambda_=state.lambda_ * (m.next_rho or 1.0))


@pytest.mark.parametrize(
    ("check", "rule", "message"),
    [
        (check_gamma_rule, Negative(), "γ = "),
        (check_gamma_rule, Impure(), "then"),
        (check_gamma_rule, Unsaved(), "no number and no tensor"),
        (check_gamma_rule, Subclass(), "no number and no tensor"),
        (check_damping_rule, Unbounded(), "λ = |lambda_ must be"),
    ],
)
def test_the_kit_finds_faults(check, rule, message):
    with pytest.raises(AssertionError, match=message):
        check(rule)


@pytest.mark.parametrize(
    ("rule", "settings", "what"),
    [
        *((FixedGamma, {"gamma": x}, "γ is finite") for x in (-1.0, math.inf, math.nan)),
        *((FixedDamping, {"lambda_": x}, "λ is finite") for x in (-1.0, math.inf, math.nan)),
        (LevenbergMarquardtRule, {"lambda_": -1.0}, "λ is finite"),
        (LevenbergMarquardtRule, {"interval": 0}, "interval"),
        *((LevenbergMarquardtRule, {"decay": x}, "decay") for x in (0.0, 1.1, math.nan)),
        *((AdaptiveDamping, {"lambda_": x}, "λ is positive") for x in (0.0, math.nan, math.inf)),
        (AdaptiveDamping, {"interval": 0}, "interval"),
        (AdaptiveDamping, {"settling": -1}, "settling"),
        (AdaptiveDamping, {"decay": 0.0}, "decay"),
        (AdaptiveDamping, {"tolerated": 1.0}, "tolerated"),
        (AdaptiveDamping, {"tolerated_exactly": -1.1}, "tolerated_exactly"),
        (AdaptiveDamping, {"rate": 0.0}, "rate"),
        (GammaSearch, {"interval": 0}, "interval"),
        *((GammaSearch, {"factor": x}, "factor") for x in (0.0, 1.0)),
        *((GammaSearch, {"minimum": x}, "minimum") for x in (0.0, -1.0)),
        (GammaSearch, {"minimum": 2.0, "maximum": 1.0}, "minimum"),
        *((GammaSearch, {"maximum": x}, "maximum") for x in (0.0, -1.0, math.nan)),
        (AdaptiveGamma, {"strength": 0.0}, "strength"),
        (AdaptiveGamma, {"drift": 1.0}, "drift"),
        *((AdaptiveGamma, {"minimum": x}, "minimum") for x in (0.0, math.inf)),
        (AdaptiveGamma, {"trusted": 1.1}, "trusted"),
        (AdaptiveGamma, {"factor": 1.0}, "factor"),
        *((LongMemory, {"taken": x}, "taken") for x in (0.0, 1.1)),
        (LongMemory, {"kept": -0.1}, "kept"),
        (LongMemory, {"share": math.nan}, "share"),
        *((LongMemory, {"longest": x}, "longest") for x in (0.5, math.inf)),
        (LongMemory, {"averaged": 0.0}, "averaged"),
    ],
)
def test_settings_are_checked(rule, settings, what):
    with pytest.raises(ValueError, match=what):
        rule(**settings)
