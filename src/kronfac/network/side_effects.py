"""Passes that leave no trace: random numbers replayed, buffers as they were.

K-FAC runs the model more often than its user does. Passes that are compared with each other have to draw
the same dropout masks, and no pass of K-FAC's own may move running statistics or counters.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase


@dataclass(frozen=True)
class RandomState:
    """The states of torch's global generators: the CPU's, and that of the GPU in use."""

    cpu: Tensor
    device: torch.device | None
    gpu: Tensor | None

    @classmethod
    def current(cls, device: torch.device) -> "RandomState":
        """The states now."""
        if device.type != "cuda":
            return cls(torch.get_rng_state(), None, None)
        return cls(torch.get_rng_state(), device, torch.cuda.get_rng_state(device))

    def restore(self) -> None:
        """Make it the current one."""
        torch.set_rng_state(self.cpu)
        if self.device is not None and self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)

    def same_as(self, other: "RandomState") -> bool:
        """Whether nothing was drawn between the two."""
        if not torch.equal(self.cpu, other.cpu):
            return False
        return self.gpu is None or other.gpu is None or torch.equal(self.gpu, other.gpu)


@contextmanager
def replay(state: RandomState | None) -> Iterator[None]:
    """Draw what was drawn from this state on; the global generators are put back. None changes nothing."""
    if state is None:
        yield
        return
    before = RandomState.current(state.device or torch.device("cpu"))
    state.restore()
    try:
        yield
    finally:
        before.restore()


@contextmanager
def unseen_writes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Write to tensors whose values are put back: graphs that they are part of stay valid."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        yield


def hooked(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one has hooks, which may change its gradient or wait for it."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


class Buffers:
    """The buffers of a model, and which of them its forward pass writes to.

    Running statistics are written by kernels that leave the version of a tensor as it is. So all buffers
    of a module count as written if one is, and those of torch's normalisation layers while they train.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[str] = set()
        self._normalises = any(isinstance(module, _NormBase) for module in model.modules())

    def versions(self) -> dict[str, tuple[int, int]]:
        """What tells whether a buffer has been written to or replaced."""
        return {name: (id(b), b._version) for name, b in self._model.named_buffers()}

    def note_writes(self, before: dict[str, tuple[int, int]]) -> None:
        """Remember which modules have written to a buffer since `versions` was asked.

        By module: kernels such as BatchNorm's write to running statistics without counting up versions,
        but every module that does so also counts its batches.
        """
        changed = {name for name, now in self.versions().items() if before.get(name) != now}
        self._written |= {name.rpartition(".")[0] for name in changed}

    def snapshot(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """Copies of the buffers that forward passes write to, for `restore`."""
        if not (self._written or self._normalises):
            return []
        kept = []
        for prefix, module in self._model.named_modules():
            own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            trained = isinstance(module, _NormBase) and module.training
            if trained or prefix in self._written:
                kept += [(module, name, buffer, buffer.clone()) for name, buffer in own.items()]
        return kept

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Buffers are afterwards as they were before."""
        kept = self.snapshot()
        try:
            yield
        finally:
            restore(kept)


@torch.no_grad()
def restore(kept: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Put back what `Buffers.snapshot` has copied; a buffer that was replaced too."""
    for module, name, buffer, value in kept:
        buffer.copy_(value)
        module._buffers[name] = buffer
