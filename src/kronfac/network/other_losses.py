"""Which other modules a loop calls with the model's outputs, for the message that names them.

A hook on all modules, from the first call of the model to the first step, and never on a compiled model:
what it finds is a name, and nothing is computed by it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from kronfac.network.global_hooks import listens_only
from kronfac.network.nested import tensors_of


class OtherLosses:
    """Listens for modules that make one number of the model's outputs.

    Args:
        is_output: whether a tensor was computed from the model's outputs.
    """

    def __init__(self, is_output: Callable[[nn.Module, Tensor], bool]) -> None:
        self.names: list[str] = []
        """Their classes."""
        self._is_output = weakref.WeakMethod(is_output)
        self._handle: RemovableHandle | None = None
        self._done = False

    def listen(self) -> None:
        """Begin, unless there has been a step."""
        if self._done or self._handle is not None:
            return
        me = weakref.ref(self)

        @listens_only
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            listener = me()
            if listener is not None and not torch.compiler.is_compiling():
                listener._hear(module, args, outputs)

        self._handle = register_module_forward_hook(hook)
        weakref.finalize(self, self._handle.remove)

    def stop(self) -> None:
        """Listen no longer, for good."""
        self._done = True
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hear(self, module: nn.Module, args: Any, outputs: Any) -> None:
        is_output = self._is_output()
        if is_output is None or not isinstance(outputs, Tensor) or outputs.numel() != 1:
            return
        name = type(module).__name__
        if name not in self.names and any(is_output(module, t) for t in tensors_of(args)):
            self.names.append(name)
