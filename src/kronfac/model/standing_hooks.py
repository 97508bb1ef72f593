"""Hooks that stay on the model and the loss from one step to the next, and on nothing else.

They hold on to nothing: a copy of the model, deep or pickled, carries hooks that remove themselves when
they are first called, and the compiler traces them as nothing.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class StandingHook:
    """A hook that calls a method of an object for as long as that lives."""

    def __init__(self, method: Callable[..., None] | None = None, arguments: int = 0) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = arguments

    def __call__(self, module: nn.Module, *given: Any) -> None:
        """A forward hook or pre-hook."""
        if torch.compiler.is_compiling():
            return
        method = None if self._method is None else self._method()
        if method is None:
            self._remove(module)
        elif len(given) == self._arguments:
            method(module, *given)
        # Else it was removed while torch was calling the hooks, as by a garbage collection, and torch no
        # longer knows that it takes keyword arguments.

    def __deepcopy__(self, memo: dict[int, Any]) -> "StandingHook":
        """A hook of nobody."""
        return StandingHook()

    def __reduce__(self) -> tuple[type["StandingHook"], tuple[()]]:
        return StandingHook, ()

    def _remove(self, module: nn.Module) -> None:
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                for entries in _entries(module):
                    entries.pop(key, None)


def _entries(module: nn.Module) -> list[dict[int, Any]]:
    """What a module knows of its forward hooks."""
    names = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    )
    return [getattr(module, name) for name in names]


def stand_by(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> list[RemovableHandle]:
    """Have two methods called around every call of a module, until the handles are removed.

    Args:
        module: the model or the loss.
        before: gets module, args and kwargs.
        after: gets module, args, kwargs and outputs, None if the call failed.
    """
    return [
        # Before other hooks, which may change what the module is given: they will do so again.
        module.register_forward_pre_hook(StandingHook(before, 2), with_kwargs=True, prepend=True),
        module.register_forward_hook(StandingHook(after, 3), with_kwargs=True, always_call=True),
    ]


def remove_hooks(handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks from what they are on."""
    for handle in handles:
        handle.remove()


def without_hooks(module: nn.Module) -> bool:
    """Whether a module has no forward hooks but those that stand by, which change nothing."""
    own = module.__dict__  # past `nn.Module.__getattr__`, which is slow to say no
    return all(
        type(hook) is StandingHook
        for name in ("_forward_hooks", "_forward_pre_hooks")
        for hook in own[name].values()
    )
