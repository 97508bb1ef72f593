"""The hooks by which a model's calls are seen, there only while a closure is recorded."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from kronfac.network.plain import instead_of_checkpoints, not_reentrant
from kronfac.network.recorder import Recording
from kronfac.network.side_effects import Buffers
from kronfac.objective import Objective


@contextmanager
def record(
    model: nn.Module, objective: Objective, buffers: Buffers | None = None
) -> Iterator[Recording]:
    """Record what this thread does with the model, inside this context.

    `buffers` are those of the model, or of what is inside if that is compiled.
    """
    own: nn.Module = getattr(model, "_orig_mod", model)
    recording = Recording(model, objective, Buffers(own) if buffers is None else buffers)
    with ExitStack() as stack:
        for path, module in _modules(model):
            before = partial(recording.before_model, path)
            after = partial(recording.after_model, path)
            for handle in (
                # Before other hooks, which may change what the module is given: they will do so again.
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ):
                stack.callback(handle.remove)
        stack.enter_context(instead_of_checkpoints(not_reentrant))
        stack.enter_context(recording)
        yield recording


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model and the modules in it that have something to train, each once.

    Not those inside of compiled ones, which a hook would make the compiler compile again.
    """
    seen: set[nn.Module] = set()
    stack = [("", model)]
    while stack:
        path, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            continue
        stack += [
            (f"{path}.{name}" if path else name, child)
            for name, child in module.named_children()
            if not isinstance(child, torch.jit.ScriptModule)
            and any(p.requires_grad for p in child.parameters())
        ]
