"""The saved state of an optimizer, and copies of it, shallow, deep or pickled, which go on from that."""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from kronfac import state as saving
from kronfac.errors import StateError
from kronfac.gradient_memory import GradientMemory
from kronfac.modes import AveragingOptimizer
from kronfac.network import check_moments
from kronfac.state_groups import (
    is_zero,
    loaded_buffers,
    loaded_options,
    momentum_of,
    saved_groups,
    with_options,
)


class CopyingOptimizer(AveragingOptimizer):
    """An optimizer whose copies go on as it would."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for `torch.save`.

        `"state"` has the momentum buffer of each parameter and `"param_groups"` the options of the groups,
        as for any optimizer of torch's; `"kfac"` has the rest, in a form of K-FAC's own.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        saved = self._saved_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    def _saved_state(self) -> dict[str, Any]:
        """The state as no hook has seen it."""
        return {
            **saved_groups(self.param_groups, self.state),
            "kfac": saving.save(self._state, self.network, self.settings, self._check.memory),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing.

        A state without `"kfac"`, from torch's distributed checkpoints, has the momentum buffers and the
        options of the groups: statistics and λ are then found anew.

        Raises:
            StateError: it is of another model, kind of inverse or version, or damaged.
        """
        if isinstance(state_dict, dict):
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        if isinstance(state_dict, dict):
            saving.check_units(state_dict.get("kfac"), self.network.units)
        options = loaded_options(state_dict, self.param_groups)
        eta = with_options(self._own_groups, options, "weight_decay").least
        network, gradients = self.network, None
        if "kfac" in state_dict:
            loaded = saving.load(state_dict["kfac"], network.units, self.settings, eta)
            state = loaded.state
            buffers = loaded_buffers(state_dict, self.param_groups)
            shown = momentum_of(buffers, self._own_groups, network)
            if "state" in state_dict and is_zero(shown) != is_zero(state.step.momentum):
                raise StateError("The state has momentum in one of 'state' and 'kfac' only.")
            network = network.continued(loaded.order, state.curvature, loaded.learned)
            check_moments(state.curvature, network.units)
            gradients = loaded.gradients
        else:
            buffers = loaded_buffers(state_dict, self.param_groups)
            momentum = momentum_of(buffers, self._own_groups, network)
            state = saving.initial_state(self.settings, eta, network.device)
            state = replace(state, step=replace(state.step, momentum=momentum))
        if not self._conditions.changed(self.network):
            self.train()  # or θ would be lost, unless other parameters have been loaded already
        self.network = network
        self._check.memory = GradientMemory() if gradients is None else gradients
        self._conditions.forget()
        network.learned.placement = None  # the state was brought to where the parameters are
        self.state.clear()
        self._become(state)
        for group, values in zip(self.param_groups, options, strict=True):
            if "param_groups" in state_dict:  # or it is of a time when groups had no options but η
                kept = group["params"]
                group.clear()
                group["params"] = kept
            group.update(copy.deepcopy(values))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module that holds its own optimizer is not complete yet when that is copied.
        if "model" not in state or _complete(state["model"]):
            self._restore(state)
        else:
            self.__dict__["_saved"] = state

    if not TYPE_CHECKING:  # or every attribute would be thought to exist

        def __getattr__(self, name: str) -> Any:
            """Finish a copy when it is first used; only what an optimizer does not have leads here."""
            if "_saved" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
            self._restore(self.__dict__.pop("_saved"))
            return getattr(self, name)

    def _restore(self, state: dict[str, Any]) -> None:
        """Become what `__getstate__` described."""
        raise NotImplementedError


def _complete(module: nn.Module) -> bool:
    """Whether a module has been copied, all that is in it included."""
    modules = vars(module).get("_modules")
    return modules is not None and all(_complete(m) for m in modules.values() if m is not None)
