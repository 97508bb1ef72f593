"""Parameter groups and momentum buffers in saved states, in the form that all of torch's optimizers have.

    {"state": {0: {"momentum_buffer": …}, …}, "param_groups": [{"params": [0, …], "lr": …, …}, …], …}

Parameters are numbered through the groups. `"kfac"`, beside these two, is read by `state.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.errors import StateError
from kronfac.groups import Groups, PerParameter, check_group, parameters_in
from kronfac.model import Matrices, Network

MOMENTUM = "momentum_buffer"
"""The entry of `optimizer.state[p]` for δ₀, by the name that it has in torch.optim.SGD."""
ENTRIES = ("state", "param_groups", "kfac")
FOREIGN = ("momentum", "betas")
"""Options that K-FAC's groups don't have, and those of other optimizers with such a buffer do."""

Options = dict[str, Any]


def saved_groups(groups: Groups, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries `"state"`, with copies of its dicts, and `"param_groups"`."""
    numbers = {p: n for n, p in enumerate(parameters_in(groups))}
    return {
        "state": {numbers[p]: dict(entry) for p, entry in state.items()},
        "param_groups": [
            {**group, "params": [numbers[p] for p in group["params"]]} for group in groups
        ],
    }


def loaded_options(saved: Any, groups: Groups) -> list[Options]:
    """The options of each group in a saved state.

    Raises:
        StateError: this is the state of no KFAC, or of one with other groups.
    """
    if not isinstance(saved, dict) or not {"kfac", "param_groups"} & saved.keys():
        raise _not_kfacs(saved)
    if "param_groups" not in saved:
        raise StateError("This is not the state_dict of a KFAC: it has no entry 'param_groups'.")
    if unknown := [entry for entry in saved if entry not in ENTRIES]:
        raise StateError(f"The state has entries that are not known here: {unknown}.")
    given = saved["param_groups"]
    if "kfac" not in saved and (not isinstance(given, list) or any(_foreign(g) for g in given)):
        raise _not_kfacs(saved)
    if not isinstance(given, list) or not all(isinstance(group, dict) for group in given):
        raise StateError("The state's param_groups must be a list of dicts. Load an earlier state.")
    sizes = [
        len(group["params"]) if isinstance(group.get("params"), list) else None for group in given
    ]
    if sizes != (expected := [len(group["params"]) for group in groups]):
        raise StateError(
            f"The state has parameter groups of {sizes} parameters; this KFAC has {expected}. Make the "
            "same groups before it is loaded, with add_param_group those that were added later."
        )
    for number, group in enumerate(given):
        if missing := [key for key in ("lr", "weight_decay") if key not in group]:
            raise StateError(
                f"The state's parameter group {number} is incomplete: it has no {missing}."
            )
    numbers = [n for group in given for n in group["params"]]
    if "kfac" in saved and numbers != list(range(len(numbers))):
        raise StateError(f"The state's parameters must be numbered from 0 on; got {numbers}.")
    options = [{key: v for key, v in group.items() if key != "params"} for group in given]
    for own, values in zip(groups, options, strict=True):
        if "param_names" in own:
            values.setdefault("param_names", own["param_names"])
    return _checked(options, groups)


def _foreign(group: Any) -> bool:
    return not isinstance(group, dict) or any(key in group for key in FOREIGN)


def _not_kfacs(saved: Any) -> StateError:
    got = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
    return StateError(
        f"This is not the state_dict of a KFAC: it has no entry 'kfac'; got {_short(got)}. Load what "
        "KFAC.state_dict() returned; after another optimizer, load the model's parameters alone and begin "
        "with a new KFAC."
    )


def _short(names: list[str] | str) -> str:
    if isinstance(names, str):
        return f"a {names}"
    return ", ".join(map(repr, names[:4])) + (", …" if len(names) > 4 else "") or "nothing"


def _checked(options: list[Options], groups: Groups) -> list[Options]:
    for number, (values, group) in enumerate(zip(options, groups, strict=True)):
        try:
            check_group({**group, **values}, number)
        except ValueError as error:
            raise StateError(f"The state can't be loaded: {error}") from error
    return options


def with_options(groups: Groups, options: Sequence[Options], key: str) -> PerParameter:
    """What parameters would have under this key with these options."""
    updated = [{**group, **values} for group, values in zip(groups, options, strict=True)]
    return PerParameter.of_groups(updated, key)


def loaded_buffers(saved: Mapping[str, Any], groups: Groups) -> list[Tensor] | None:
    """The momentum buffers of all parameters; None before the first step.

    Raises:
        StateError: there is none for some parameter, or one that can't be.
    """
    entries = saved.get("state")
    if entries == {}:
        return None
    if not isinstance(entries, dict):
        raise StateError("The state has no dict 'state' with the momentum buffers.")
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    if unknown := [n for n in entries if n not in numbers]:
        raise StateError(f"The state has momentum buffers of {unknown}, which are in no group.")
    buffers = []
    for p, number in zip(parameters_in(groups), numbers, strict=True):
        entry = entries.get(number)
        buffer = entry.get(MOMENTUM) if isinstance(entry, dict) else None
        alone = isinstance(entry, dict) and len(entry) == 1
        if not alone or not isinstance(buffer, Tensor) or buffer.shape != p.shape:
            raise StateError(
                f"The state must have a {MOMENTUM} of the shape {tuple(p.shape)}, and that alone, for "
                f"parameter {number}. Load the state of a KFAC, for the same model."
            )
        if not bool(buffer.isfinite().all()):
            raise StateError(f"The state's {MOMENTUM} of parameter {number} must be finite.")
        buffers.append(buffer)
    if len({buffer.dtype for buffer in buffers}) > len({p.dtype for p in parameters_in(groups)}):
        raise StateError("The state's momentum buffers differ in dtype. Load an earlier state.")
    return buffers


def momentum_of(
    buffers: Sequence[Tensor] | None, groups: Groups, network: Network
) -> Matrices | None:
    """The momentum buffer as one vector, in the parameters' dtype; None if it is zero."""
    if buffers is None or not any(bool(buffer.any()) for buffer in buffers):
        return None
    pairs = zip(parameters_in(groups), buffers, strict=True)
    return _join(network, {p: buffer.to(p) for p, buffer in pairs})


def is_zero(momentum: Matrices | None) -> bool:
    """Whether there is no momentum, or none left."""
    return momentum is None or not any(bool(V.any()) for V in momentum)


def extended_momentum(old: Network, new: Network, momentum: Matrices | None) -> Matrices | None:
    """The momentum buffer of a network with further parameters, for which it is zero."""
    if momentum is None:
        return None
    known = dict(zip(old.parameters, old.split(momentum), strict=True))
    return _join(new, {p: known.get(p, torch.zeros_like(p)) for p in new.parameters})


def _join(network: Network, tensors: Mapping[nn.Parameter, Tensor]) -> Matrices:
    joined = network.join([tensors[p].detach() for p in network.parameters])
    return tuple(V.clone() for V in joined)
