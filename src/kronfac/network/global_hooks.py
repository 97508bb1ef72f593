"""Hooks on all modules: those of others, which are to be called, and K-FAC's own, which only listen.

Somebody who has hooks on all modules waits for their calls, so that K-FAC does not compute a perceptron by
hand, past its modules. Its own hooks are no reason: what they listen for is not in such a pass.
"""

from collections.abc import Callable
from typing import TypeVar

from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

F = TypeVar("F", bound=Callable[..., None])

_LISTENS = "_kronfac_listens"


def listens_only(hook: F) -> F:
    """Mark a hook of K-FAC's own; a decorator."""
    setattr(hook, _LISTENS, True)
    return hook


def others_wait() -> bool:
    """Whether somebody else has a hook on the forward pass of all modules."""
    if not (_global_forward_hooks or _global_forward_pre_hooks):
        return False
    hooks = (*_global_forward_hooks.values(), *_global_forward_pre_hooks.values())
    return not all(getattr(hook, _LISTENS, False) for hook in hooks)
