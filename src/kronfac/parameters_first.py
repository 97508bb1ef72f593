"""The model of an optimizer that was made with parameters alone: what is called and holds them all.

Frameworks such as skorch, timm and PINA construct an optimizer with parameters. The model is the module of
the first call, outermost and with gradients enabled, whose parameters contain all of them. Until then there
are two hooks on the calls of all modules; afterwards there are none.
"""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from kronfac.copying import CopyingOptimizer
from kronfac.errors import LoopError
from kronfac.groups import Groups, RateWarning, parameters_in
from kronfac.network.global_hooks import listens_only
from kronfac.state_groups import loaded_options, saved_groups

Meet = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Gets the model, and what it is about to be called with."""


class ModelFound(BaseException):
    """Ends a closure at its first call of the model; no error, so that none of its handlers catches it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


@dataclass
class Awaited:
    """What an optimizer without a model was made with, and has been given since."""

    loss: nn.Module
    settings: dict[str, Any]
    loaded: dict[str, Any] | None = None
    """A state that will be loaded when the model is known."""
    evaluates: bool | None = None
    """Whether the last call was that of `eval()` or that of `train()`; None if there was neither."""


class ModelWatch:
    """Waits for the call of a module that holds all parameters of an optimizer.

    Args:
        groups: the optimizer's parameter groups, which may grow.
        meet: a method of the optimizer, called once; it is not kept alive.
    """

    def __init__(self, groups: Groups, meet: Meet) -> None:
        self._groups = groups
        self._meet = weakref.WeakMethod(meet)
        self._interrupts = False
        # Hooks on the calls of all modules are not told keyword arguments, unless the module called has
        # their number among those of its own hooks that are: the first one puts the second's there.
        self._handles = [
            register_module_forward_pre_hook(self._look),
            register_module_forward_pre_hook(self._found),
        ]
        weakref.finalize(meet.__self__, self.close)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise `ModelFound` at the call of the model, before it begins."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    @listens_only
    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        wanted = {id(p) for p in parameters_in(self._groups) if p.requires_grad}
        if wanted <= {id(p) for p in module.parameters()}:
            if self._interrupts:
                raise ModelFound(module)
            module._forward_pre_hooks_with_kwargs[self._handles[1].id] = True

    @listens_only
    def _found(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if kwargs is None:
            return
        del module._forward_pre_hooks_with_kwargs[self._handles[1].id]
        self.close()
        meet = self._meet()
        if meet is not None:
            meet(module, args, kwargs)


def model_of(closure: Callable[[], Any], watch: ModelWatch) -> nn.Module:
    """The model that a closure calls; it is stopped there, and will be called again.

    Raises:
        LoopError: it calls no module that holds all parameters.
    """
    try:
        with watch.interrupting(), torch.enable_grad():
            closure()
    except ModelFound as found:
        watch.close()
        return found.model
    raise no_model()


def no_model() -> LoopError:
    """The error of a step before the model was called."""
    return LoopError(
        "KFAC.for_parameters learns of the model when it is called, with gradients enabled, but no module "
        "that holds all the given parameters has been called before step(). Call one module with all of "
        "them, or make the optimizer with it: KFAC(model, loss, params=…)."
    )


class LateOptimizer(CopyingOptimizer):
    """An optimizer that may get its model after it was made, and has no state until then."""

    _awaited: Awaited | None = None
    _warn_of_rate: RateWarning

    if not TYPE_CHECKING:  # or every attribute would be thought to exist

        def __getattr__(self, name: str) -> Any:
            """Say what is missing; only what an optimizer does not have leads here."""
            if self._awaited is not None:
                raise AttributeError(
                    f"KFAC.for_parameters has no {name!r} until its model has been called with gradients "
                    "enabled."
                )
            return super().__getattr__(name)

    def _await_model(self, params: Any, awaited: Awaited) -> None:
        """Become an optimizer of parameters whose model is not known yet."""
        defaults = {key: awaited.settings[key] for key in ("lr", "weight_decay")}
        self._awaited, self.report = awaited, None
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._warn_of_rate = RateWarning()
        self._warn_of_rate(self.param_groups)
        self._watch = ModelWatch(self.param_groups, self._meet)

    def _become_complete(self, model: nn.Module, awaited: Awaited) -> None:
        """Be constructed with the model and the groups that there are."""
        raise NotImplementedError

    def _meet(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Get the model, and record its first call, which is beginning."""
        self._adopt(model)
        self._recorder._before_model(model, args, kwargs)

    def _adopt(self, model: nn.Module) -> None:
        """Get the model. Groups, which others hold on to, stay the dicts that they are, and hooks stay."""
        awaited, groups = self._awaited, self.param_groups
        assert awaited is not None
        kept = {name: value for name, value in vars(self).items() if name.endswith("_hooks")}
        self._become_complete(model, awaited)
        del self._awaited
        vars(self).update(kept)
        for group, complete in zip(groups, self.param_groups, strict=True):
            group.update(complete)
        self.param_groups = groups
        if awaited.loaded is not None:
            self.load_state_dict(awaited.loaded)
        if awaited.evaluates is not None:
            (self.eval if awaited.evaluates else self.train)()

    def eval(self) -> None:
        """Put the average of the iterates into the model, as soon as that is known."""
        if self._awaited is None:
            super().eval()
        else:
            self._awaited.evaluates = True

    def train(self) -> None:
        """Put the parameters that training goes on from back into the model, as soon as that is known."""
        if self._awaited is None:
            super().train()
        else:
            self._awaited.evaluates = False

    def _need_model(self, closure: Callable[[], Any] | None) -> bool:
        """Find the model if it is not known; whether there is one, and so something to take a step from.

        Raises:
            LoopError: there is none, and some parameter has a gradient, or the learning rate is not 0.
        """
        if self._awaited is None:
            return True
        if closure is not None:
            self._adopt(model_of(closure, self._watch))
            return True
        grads = [p.grad for p in parameters_in(self.param_groups)]
        idle = all(grad is None or not bool(grad.any()) for grad in grads)
        if idle and not any(float(group["lr"]) for group in self.param_groups):
            return False  # as torch's distributed checkpoints call it
        raise no_model()

    def _saved_state(self) -> dict[str, Any]:
        if self._awaited is None:
            return super()._saved_state()
        return self._awaited.loaded or saved_groups(self.param_groups, self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, as soon as the model is known; see `CopyingOptimizer`."""
        if self._awaited is None:
            super().load_state_dict(state_dict)
            return
        options = loaded_options(state_dict, self.param_groups)
        fresh = "kfac" not in state_dict and not state_dict.get("state")
        self._awaited.loaded = None if fresh else copy.deepcopy(state_dict)
        for group, values in zip(self.param_groups, options, strict=True):
            group.update(copy.deepcopy(values))
