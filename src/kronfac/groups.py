"""What parameter groups give to their parameters: the learning rate, and η, the weight decay."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

LIKELY_ADAMS = 0.1
"""Learning rate below which it is likely another optimizer's: K-FAC's steps have their length already."""
PEAKS = ("lr", "initial_lr", "max_lr")
"""Where a group, or a schedule in it, has the largest learning rate."""

Groups = Sequence[Mapping[str, Any]]
Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
"""What torch's optimizers take."""


@dataclass(frozen=True, eq=False)
class PerParameter:
    """One number for every parameter: the usual one, and those of parameters that have another."""

    usual: float
    others: Mapping[nn.Parameter, float] = field(default_factory=dict)

    @classmethod
    def of_groups(cls, groups: Groups, key: str) -> "PerParameter":
        """The number that each group has under this key, for its parameters."""
        values = [float(group[key]) for group in groups]
        usual = next(v for v, group in zip(values, groups, strict=True) if group["params"])
        pairs = [pair for pair in zip(values, groups, strict=True) if pair[0] != usual]
        return cls(usual, {p: value for value, group in pairs for p in group["params"]})

    def __getitem__(self, p: nn.Parameter) -> float:
        return self.others.get(p, self.usual)

    def __bool__(self) -> bool:
        """Whether it is not 0 everywhere."""
        return bool(self.usual or self.others)

    @property
    def uniform(self) -> bool:
        """Whether it is the same everywhere."""
        return not self.others

    @cached_property
    def least(self) -> float:
        """The smallest of the numbers."""
        return min(self.usual, *self.others.values()) if self.others else self.usual

    @cached_property
    def largest(self) -> float:
        """The largest of the numbers."""
        return max(self.usual, *self.others.values()) if self.others else self.usual

    def times(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors shaped like these parameters, each times its parameter's number."""
        return [t * self[p] for p, t in zip(parameters, tensors, strict=True)]


def check_group(group: Mapping[str, Any], number: int | None = None) -> None:
    """Raise a ValueError if the learning rate or the weight decay of a group can't be one."""
    for key in ("lr", "weight_decay"):
        value = group[key]
        single = isinstance(value, (int, float)) or (
            isinstance(value, Tensor) and value.numel() == 1
        )
        if not single or isinstance(value, bool) or not 0 <= float(value) < math.inf:
            whose = "KFAC's" if number is None else f"In parameter group {number} of KFAC,"
            raise ValueError(
                f"{whose} {key} is one number, finite and not negative; got {value!r}."
            )


def groups_of(params: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups from what torch's optimizers take: parameters, (name, parameter) pairs, or dicts.

    Frozen parameters are left out. The dicts are copies.

    Raises:
        TypeError: they are something else.
        ValueError: one is no parameter of the model, or all are frozen.
    """
    if isinstance(params, (Tensor, dict, set)):
        raise TypeError(
            "KFAC's params is a list of parameters, or of parameter groups such as {'params': …, "
            f"'weight_decay': 0.0}}; got a {type(params).__name__}."
        )
    items = list(params)
    if not items or not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = [{**group, "params": _trained(group, model)} for group in items]
    if not any(group["params"] for group in groups):
        raise ValueError(
            "KFAC's params has no parameter that is trained; give it some, or none at all."
        )
    return groups


def parameters_in(groups: Groups) -> list[nn.Parameter]:
    """The parameters of all groups, without their names."""
    items = [item for group in groups for item in group["params"]]
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _trained(group: Mapping[str, Any], model: nn.Module) -> list[Any]:
    """The parameters of a group that are not frozen, with their names if they come with them."""
    given = group["params"]
    if isinstance(given, set):
        raise TypeError("The parameters of a group need an order; give KFAC a list, not a set.")
    items = [given] if isinstance(given, Tensor) else list(given)
    known = {id(p) for p in model.parameters()}
    kept = []
    for item in items:
        p = item[1] if isinstance(item, tuple) else item
        if not isinstance(p, Tensor):
            raise TypeError(
                f"A parameter group must hold parameters of the model; got a {type(p).__name__}."
            )
        if id(p) not in known:
            raise ValueError(
                f"KFAC trains parameters of its model; one of the shape {tuple(p.shape)} in its groups is "
                "none of them. Give it parameters of the model that it was made with."
            )
        if p.requires_grad:
            kept.append(item)
    return kept


def likely_adams_rate(groups: Groups) -> str | None:
    """A warning of the first learning rate that is likely Adam's; schedules may start or end below it."""
    for number, group in enumerate(groups):
        peak = max(float(group[key]) for key in PEAKS if group.get(key) is not None)
        if 0 < peak < LIKELY_ADAMS:
            return (
                f"KFAC has lr={peak:.4g} in the parameter group {number}, which is likely another "
                "optimizer's. KFAC finds the length of its steps itself, and lr multiplies them: leave "
                "it at 1, or let a schedule start at 1."
            )
    return None
