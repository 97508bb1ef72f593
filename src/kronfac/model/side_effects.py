"""Passes that leave no trace: random numbers replayed, buffers as they were.

K-FAC runs the model more often than its user does. Passes that are compared with each other have to draw
the same dropout masks and to start from the same buffers, and no pass of K-FAC's own may move running
statistics or counters.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

Kept = tuple[nn.Module, str, Tensor, Tensor]
"""A module, the name of a buffer of its own, that buffer, and a copy of its values."""
Start = tuple[str, str, Tensor]
"""The path of a module, the name of a buffer of its own, and the values that a pass starts from."""


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


@torch.no_grad()
def put_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values to tensors; if something is raised in between, all of them once more before that is."""
    try:
        for tensor, value in pairs:
            tensor.copy_(value)
    except BaseException:
        for tensor, value in pairs:
            tensor.copy_(value)
        raise


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
        self._seen: set[tuple[str, bytes]] = set()
        self._normalises = any(isinstance(module, _NormBase) for module in model.modules())

    @property
    def known(self) -> tuple[frozenset[str], frozenset[tuple[str, bytes]]]:
        """What passes have shown of them so far."""
        return frozenset(self._written), frozenset(self._seen)

    @known.setter
    def known(self, value: tuple[frozenset[str], frozenset[tuple[str, bytes]]]) -> None:
        self._written, self._seen = set(value[0]), set(value[1])

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

    def snapshot(self) -> list[Kept]:
        """Copies of the buffers that forward passes write to, for `restore`."""
        if not (self._written or self._normalises):
            return []
        return self._copies(self._writes)

    def before_call(self, path: str) -> list[Kept]:
        """Copies of the buffers that a call of this module may write to; for `after_call`, or `restore`.

        Of all buffers the first time that it is called with the same modules in training: which of them
        it writes to shows then.
        """
        return self.snapshot() if self._call(path) in self._seen else self._copies(lambda *_: True)

    def after_call(self, path: str, kept: Sequence[Kept]) -> tuple[Start, ...]:
        """What the call started from: the values before it of all buffers that it writes to."""
        if (call := self._call(path)) not in self._seen:
            self._seen.add(call)
            written = {
                module
                for module, name, buffer, value in kept
                if module._buffers.get(name) is not buffer
                # Those without storage have nothing to compare.
                or not (buffer.is_meta or torch.equal(buffer, value))
            }
            self._written |= {p for p, module in self._model.named_modules() if module in written}
        paths = {module: p for p, module in self._model.named_modules()} if kept else {}
        return tuple((paths[module], name, value) for module, name, _, value in self.written(kept))

    def written(self, kept: Sequence[Kept]) -> list[Kept]:
        """The copies of buffers that forward passes write to."""
        if not kept:
            return []
        writing = {m for path, m in self._model.named_modules() if self._writes(path, m)}
        return [copy for copy in kept if copy[0] in writing]

    def _call(self, path: str) -> tuple[str, bytes]:
        """What calls that write to the same buffers have in common."""
        return path, bytes(module.training for module in self._model.modules())

    def _writes(self, path: str, module: nn.Module) -> bool:
        return path in self._written or (isinstance(module, _NormBase) and module.training)

    def _copies(self, wanted: Callable[[str, nn.Module], bool]) -> list[Kept]:
        copies: dict[int, Tensor] = {}  # modules may have a buffer in common
        return [
            (module, name, buffer, copies.setdefault(id(buffer), buffer.detach().clone()))
            for path, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer) and wanted(path, module)
        ]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Buffers are afterwards as they were before."""
        kept = self.snapshot()
        try:
            yield
        finally:
            restore(kept)


@torch.no_grad()
def restore(kept: Sequence[Kept]) -> None:
    """Put back what `Buffers.snapshot` has copied; a buffer that was replaced too."""
    for module, name, buffer, _ in kept:
        module._buffers[name] = buffer
    put_back([(buffer, value) for _, _, buffer, value in kept])


@contextmanager
def start_from(model: Any, buffers: Sequence[Start]) -> Iterator[None]:
    """Buffers with these values while this lasts, which a pass may write to; then the model's own again.

    Other tensors, not the model's own with other values: graphs of several passes keep what each has read.
    """
    if not buffers:
        yield
        return
    places = [(model.get_submodule(path), name, value) for path, name, value in buffers]
    own = [(module, name, module._buffers[name]) for module, name, _ in places]
    copies: dict[int, Tensor] = {}
    try:
        for module, name, value in places:
            module._buffers[name] = copies.setdefault(id(value), value.clone())
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
