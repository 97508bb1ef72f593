"""A conformance kit for rules: what the optimizer relies on, for rules of your own.

    from kronfac.testing import check_gamma_rule

    def test_my_rule():
        check_gamma_rule(MyRule())

A check raises `AssertionError` with the measurement that broke it.
"""

import copy
import io
import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kronfac.control import (
    AnyDampingRule,
    AnyGammaRule,
    DampingState,
    GammaRule,
    Measurement,
    StepRule,
    StepState,
)
from kronfac.control.base import Rule
from kronfac.errors import StateError
from kronfac.storage import Storable, pack, unpack

TRIALS = 200


def measurements(count: int = TRIALS, seed: int = 0) -> Iterator[Measurement]:
    """Measurements of every kind and size, finite but for ρ, which may be anything."""
    draw = random.Random(seed)

    def number() -> float:
        return float(10 ** draw.uniform(-8, 8))

    rhos = (None, -math.inf, math.nan, -3.0, -0.2, 0.2, 0.5, 0.9, 1.0, 30.0)
    for _ in range(count):
        measured = draw.choice(("rho", "next_rho", "rejected", None))
        yield Measurement(
            iteration=draw.choice((1, 2, 5, 20, 40, draw.randrange(1, 10**5))),
            examples=draw.randrange(1, 10**4),
            loss=number(),
            weight_decay=draw.choice((0.0, 1e-5, number())),
            lambda_=number(),
            gamma=number(),
            summed=draw.random() < 0.5,
            predicted_change=-number(),
            rho=draw.choice(rhos) if measured == "rho" else None,
            next_rho=draw.choice(rhos) if measured == "next_rho" else None,
            rejected=measured == "rejected",
            curvature_share=draw.random(),
            noisy=draw.random() < 0.5,
            elapsed=draw.randrange(1, 100),
            confirmed=draw.choice((None, draw.uniform(-1, 1))),
            noise=draw.choice((None, number())),
            inverse_age=draw.randrange(1, 1000),
            inverse_lambda=draw.choice((None, number())),
            drifted=draw.random() < 0.3,
            sampling_error=number(),
            mean_curvature=number(),
        )


def check_gamma_rule(rule: AnyGammaRule) -> None:
    """Check that γ is positive and finite after any measurement, and the state pure and saveable."""
    for m in measurements():
        state = rule.init(m)
        _check_saving(state)
        for _ in range(3):
            candidates = _pure(rule.candidates, state, m)
            _require(bool(candidates), "there is no candidate", rule, m)
            for gamma in candidates:
                _require(0 < gamma < math.inf, f"γ = {gamma}", rule, m)
            _require(len(set(candidates)) == len(candidates), f"twice in {candidates}", rule, m)
            _pure(rule.due, state, m)
            state = _check_update(
                rule, state, replace(m, gamma=candidates[-1], candidates=candidates)
            )
            _require(state.gamma == candidates[-1], f"γ = {state.gamma} after the step", rule, m)


def check_units(rule: AnyGammaRule | AnyDampingRule) -> None:
    """Check that λ scales with the units of the objective, and γ with their root.

    Not for rules with an absolute number in them, such as `FixedGamma(0.3)`.
    """
    for m in measurements():
        for scale in (1e-8, 1e-3, 1e8):
            ours, theirs = m, in_units(m, scale)
            state, scaled = rule.init(ours), rule.init(theirs)
            if isinstance(state, DampingState):
                state, scaled = (
                    replace(s, lambda_=x.lambda_) for s, x in ((state, ours), (scaled, theirs))
                )
            for _ in range(3):
                if isinstance(rule, GammaRule):
                    values = rule.candidates(state, ours), rule.candidates(scaled, theirs)
                    _require(_proportional(*values, scale**0.5), f"γ = {values}", rule, theirs)
                    ours, theirs = (
                        replace(x, gamma=c[-1], candidates=c)
                        for x, c in zip((ours, theirs), values, strict=True)
                    )
                state, scaled = rule.update(state, ours), rule.update(scaled, theirs)
                if isinstance(state, DampingState):
                    values = (state.lambda_,), (scaled.lambda_,)
                    _require(_proportional(*values, scale), f"λ = {values}", rule, theirs)


def in_units(m: Measurement, scale: float) -> Measurement:
    """The measurement for an objective that is `scale` times as large."""
    linear = (
        "loss", "weight_decay", "lambda_", "resolution", "predicted_change",
        "noise", "inverse_lambda", "sampling_error", "mean_curvature",
    )  # fmt: skip
    changes = {name: getattr(m, name) for name in linear}
    changes = {name: value and scale * value for name, value in changes.items()}
    root = scale**0.5
    gammas = tuple(root * gamma for gamma in m.candidates)
    return replace(m, gamma=root * m.gamma, candidates=gammas, **changes)


def _proportional(ours: tuple[float, ...], theirs: tuple[float, ...], scale: float) -> bool:
    return len(ours) == len(theirs) and all(
        math.isclose(scale * a, b, rel_tol=1e-9) for a, b in zip(ours, theirs, strict=True)
    )


def check_damping_rule(rule: AnyDampingRule) -> None:
    """Check that λ stays finite and not negative, and that states are left unchanged and can be saved."""
    for m in measurements():
        state = rule.init(m)
        _check_saving(state)
        if math.isnan(state.lambda_):  # the first step finds one
            state = replace(state, lambda_=m.lambda_)
        for k in range(1, 4):
            _require(
                rule.measures(k) in ("own", "next", None), "measures() is none of these", rule, m
            )
            state = _check_update(rule, state, m)
            _require(0 <= state.lambda_ < math.inf, f"λ = {state.lambda_}", rule, m)


def check_step_rule(rule: StepRule) -> None:
    """Check that the step has a coefficient for each direction, and a finite predicted change."""
    draw = random.Random(0)
    for m in measurements():
        _check_saving(rule.init(m))
        a, b, c = draw.uniform(0.1, 2), draw.uniform(0.1, 2), draw.uniform(-0.9, 0.9)
        Q = [[a * a, a * b * c], [a * b * c, b * b]]
        r = [draw.uniform(-1, 1), draw.uniform(-1, 1)]
        for k in (1, 2) if rule.momentum else (1,):
            step = rule.solve([row[:k] for row in Q[:k]], r[:k], StepState(), m)
            _require(len(step.coefficients) == k, f"{k} directions, {step}", rule, m)
            finite = math.isfinite(step.predicted_change) and 0 <= step.remembered <= 1
            _require(finite, str(step), rule, m)


def _check_update(rule: Rule[Any], state: Any, m: Measurement) -> Any:
    after = _pure(rule.update, state, m)
    _require(type(after) is type(state), f"{type(state)} became {type(after)}", rule, m)
    _check_saving(after)
    return after


def _check_saving(state: Any) -> None:
    """What a rule remembers goes through a file, and is what it was."""
    assert isinstance(state, Storable), f"What a rule remembers is a Storable; got {state!r}."
    packed = pack(state)
    assert _plain(packed), f"{state!r} holds what is no number and no tensor."
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    packed = torch.load(file, weights_only=True)
    try:
        loaded = unpack(packed, classes=[type(state)])
    except StateError as error:
        raise AssertionError(f"{state!r} can't be loaded: {error}") from error
    assert _same(loaded, state), f"{state!r} was saved and is {loaded!r}."


def _plain(packed: Any) -> bool:
    """Whether `torch.load(weights_only=True)` reads it; it knows exact types, not subclasses of them."""
    if isinstance(packed, dict):
        return all(type(key) is str and _plain(item) for key, item in packed.items())
    if isinstance(packed, (list, tuple)):
        return all(map(_plain, packed))
    return packed is None or type(packed) in (bool, int, float, str) or isinstance(packed, Tensor)


def _pure(function: Any, *args: Any) -> Any:
    """The value, computed twice from arguments that stay as they were."""
    before = copy.deepcopy(args)
    value, again = function(*args), function(*args)
    assert _same(value, again), f"{function} gives {value!r}, then {again!r}, from {args!r}."
    assert _same(args, before), f"{function} changed its arguments: {before!r} became {args!r}."
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if is_dataclass(a):
        return type(a) is type(b) and all(
            _same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_same, a, b))
    both_nan = isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b)
    return bool(a is b or a == b or both_nan)


def _require(holds: bool, what: str, rule: Rule[Any], m: Measurement) -> None:
    assert holds, f"{rule!r}: {what}, from {m!r}."
