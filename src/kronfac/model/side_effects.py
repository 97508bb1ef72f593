"""Run the model as it was trained, in full precision, and without leaving traces.

K-FAC runs the model more often than its user does. Passes that are compared with each other have to draw
the same dropout masks and to start from the same buffers, and no pass of K-FAC's own may move running
statistics or counters. The hooks that record the user's own passes leave no traces in copies of the model.

A step may be taken inside `torch.autocast`. The gradient of a mini-batch can be computed in half precision;
second moments, their inverses, the quadratic model and small changes of the loss can't. The fast path of
`nn.Transformer*` leaves out padding, and reentrant checkpoints have no derivative but their own. Nothing is
switched for the process: a `TorchFunctionMode` belongs to its thread, and so does what stands in for
checkpoints here.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

Function = Callable[..., Any]
Context = Callable[[], AbstractContextManager[object]]
Kept = tuple[nn.Module, str, Tensor, Tensor]
"""A module, the name of a buffer of its own, that buffer, and a copy of its values."""


# ------------------------------------------------------------------------------------ random numbers


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
    """Replay random numbers from this state on, then restore the generators; None does nothing."""
    if state is None:
        yield
        return
    before = RandomState.current(state.device or torch.device("cpu"))
    state.restore()
    try:
        yield
    finally:
        before.restore()


# ------------------------------------------------------------------------------ values put back later


@contextmanager
def unseen_writes(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Write to tensors whose values will be put back, so that graphs with these tensors stay valid."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensors)):
        yield


@torch.no_grad()
def put_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write values to tensors: all of them, also if Ctrl-C interrupts it."""
    try:
        for tensor, value in pairs:
            tensor.copy_(value)
    except BaseException:
        for tensor, value in pairs:
            tensor.copy_(value)
        raise


class Buffers:
    """The buffers of a model, and which of its modules write to theirs in a forward pass.

    Kernels that write running statistics leave the version of a tensor as it is. So values are compared,
    the first time that a module is called with the same modules in training. Torch's normalisation layers
    write while they train.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[nn.Module] = set()
        self._compared: set[tuple[str, bytes]] = set()
        self._normalises = any(isinstance(module, _NormBase) for module in model.modules())

    def snapshot(self) -> list[Kept]:
        """Copies of the buffers that forward passes write to, for `restore`."""
        if not (self._written or self._normalises):
            return []
        return self._copies(self._writes)

    def before_call(self, path: str) -> list[Kept]:
        """Copies of the buffers that a call of this module may write to; for `after_call`, or `restore`."""
        compared = self._call(path) in self._compared
        return self.snapshot() if compared else self._copies(lambda module: True)

    def after_call(self, path: str, kept: Sequence[Kept]) -> tuple[Kept, ...]:
        """What the call started from: the copies of all buffers that it writes to."""
        if (call := self._call(path)) not in self._compared:
            self._compared.add(call)
            self._written |= {copy[0] for copy in kept if is_changed(copy)}
        return tuple(self.written(kept))

    def written(self, kept: Sequence[Kept]) -> list[Kept]:
        """The copies of buffers that forward passes write to."""
        return [copy for copy in kept if self._writes(copy[0])]

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Buffers are afterwards as they were before."""
        kept = self.snapshot()
        try:
            yield
        finally:
            restore(kept)

    def _call(self, path: str) -> tuple[str, bytes]:
        """What calls that write to the same buffers have in common."""
        return path, bytes(module.training for module in self._model.modules())

    def _writes(self, module: nn.Module) -> bool:
        return module in self._written or (isinstance(module, _NormBase) and module.training)

    def _copies(self, wanted: Callable[[nn.Module], bool]) -> list[Kept]:
        copies: dict[int, Tensor] = {}  # modules may have a buffer in common
        return [
            (module, name, buffer, copies.setdefault(id(buffer), buffer.detach().clone()))
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not is_lazy(buffer) and wanted(module)
        ]


def is_changed(kept: Kept) -> bool:
    """Whether a buffer was written to or replaced since it was copied."""
    module, name, buffer, value = kept
    # Those without storage have nothing to compare.
    same = buffer.is_meta or torch.equal(buffer, value)
    return module._buffers.get(name) is not buffer or not same


@torch.no_grad()
def restore(kept: Sequence[Kept]) -> None:
    """Put back what `Buffers.snapshot` has copied; a buffer that was replaced too."""
    for module, name, buffer, _ in kept:
        module._buffers[name] = buffer
    put_back([(buffer, value) for _, _, buffer, value in kept])


@contextmanager
def start_from(kept: Sequence[Kept]) -> Iterator[None]:
    """Give a pass buffers with these values, which it may write to; then the model has its own again.

    Other tensors, not the model's own with other values: graphs of several passes keep what each has read.
    """
    own = [(module, name, module._buffers[name]) for module, name, _, _ in kept]
    copies: dict[int, Tensor] = {}
    try:
        for module, name, _, value in kept:
            module._buffers[name] = copies.setdefault(id(value), value.clone())
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Leave random numbers and buffers as they are; a pass inside writes to copies."""
    buffers = [
        (module, name, buffer, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with replay(RandomState.current(device_of(model))), start_from(buffers):
        yield


# ---------------------------------------------------------------------------------------- precision


def mixed(device: torch.device) -> bool:
    """Whether `torch.autocast` is in force for tensors on this device."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


@contextmanager
def full_precision(device: torch.device) -> Iterator[Context]:
    """Switch autocast off; the context that this gives restores the caller's, for the closure."""
    if not mixed(device):
        # No context at all: a closure's own autocast would not be the outermost and keep its cache.
        yield nullcontext
        return
    kind = device.type
    # Without its cache of weights: a closure may be called again with other parameters.
    callers = partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=False)
    try:
        with torch.autocast(kind, enabled=False):
            yield callers
    finally:
        torch.clear_autocast_cache()  # of weights from before the step


@contextmanager
def own_pass() -> Iterator[None]:
    """Run the modules' own code, in full precision, without reentrant checkpoints.

    Checkpoints of the other kind stay: they have all derivatives, and save memory.
    """
    before = torch._C._is_any_autocast_enabled() and _autocast_kinds()
    try:
        with instead_of_checkpoints(_call), _IN_FULL:
            yield
    finally:
        for kind in before or ():
            torch.set_autocast_enabled(kind, True)


class _InFull(TorchFunctionMode):
    """Switches off an autocast that a module opens in its own forward.

    Modules with a fast path do not take it while any mode is active.
    """

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch._C._is_any_autocast_enabled():
            for kind in _autocast_kinds():
                torch.set_autocast_enabled(kind, False)
        return func(*args, **(kwargs or {}))


_IN_FULL = _InFull()


def _autocast_kinds() -> list[str]:
    """The kinds of devices that autocast is enabled for."""
    return [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.is_autocast_enabled(kind)]


# --------------------------------------------------------------------------------------- checkpoints

_handlers: dict[int, list[Function]] = {}
"""What each thread does in place of a reentrant checkpoint."""
_lock = threading.Lock()


def _checkpoints() -> Any:
    """Torch's module, when a pass first needs it: torch 2.7 imports it, and sympy with it, only then."""
    from torch.utils import checkpoint  # noqa: PLC0415

    return checkpoint


class _StandIn:
    """In place of torch's function while a thread has a handler; for other threads it is that function."""

    original: Any = None

    @classmethod
    def apply(cls, function: Function, preserve_rng_state: bool, *args: Any) -> Any:
        """What `torch.utils.checkpoint` calls."""
        own = _handlers.get(threading.get_ident())
        call = own[-1] if own else cls.original.apply
        return call(function, preserve_rng_state, *args)


@contextmanager
def instead_of_checkpoints(handler: Function) -> Iterator[None]:
    """Let this thread call `handler(function, preserve_rng_state, *args)` for reentrant checkpoints."""
    thread, checkpoints = threading.get_ident(), _checkpoints()
    with _lock:
        if not _handlers:
            _StandIn.original = checkpoints.CheckpointFunction
            checkpoints.CheckpointFunction = _StandIn
        _handlers.setdefault(thread, []).append(handler)
    try:
        yield
    finally:
        with _lock:
            _handlers[thread].pop()
            if not _handlers[thread]:
                del _handlers[thread]
            if not _handlers:
                checkpoints.CheckpointFunction = _StandIn.original


def _call(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def not_reentrant(function: Function, preserve_rng_state: bool, *args: Any) -> Any:
    """The other kind of checkpoint: the same values and memory, and a graph that can be looked into."""
    return _checkpoints().checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


# --------------------------------------------------------------------------------------------- hooks


class StandingHook:
    """A hook that calls a method of an object for as long as that lives.

    It keeps nothing alive. A copy of the model, deep or pickled, has a hook that removes itself when it is
    first called, and the compiler traces it as nothing.
    """

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

    def __reduce__(self) -> tuple[type["StandingHook"], tuple[()]]:
        """A copy has no method."""
        return StandingHook, ()

    def _remove(self, module: nn.Module) -> None:
        own = [x for name, x in vars(module).items() if name.startswith("_forward_")]
        for key in {key for hooks in own for key, hook in hooks.items() if hook is self}:
            for hooks in own:
                hooks.pop(key, None)


def register_hooks(
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


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of the module is compiled."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def eager_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model and the modules in it that have something to train, each once, with their paths.

    Not those inside of compiled ones, which a hook would make the compiler compile again.
    """
    compiled: tuple[str, ...] = ()
    for path, module in model.named_modules():
        idle = path and not any(p.requires_grad for p in module.parameters())
        if idle or path.startswith(compiled) or isinstance(module, torch.jit.ScriptModule):
            continue
        yield path, module
        if is_compiled(module):
            compiled += (f"{path}." if path else "",)


def remove_hooks(handles: Sequence[RemovableHandle]) -> None:
    """Remove hooks from what they are on."""
    for handle in handles:
        handle.remove()


def without_hooks(module: nn.Module) -> bool:
    """Whether a module has no forward hooks but K-FAC's standing ones, which change nothing."""
    own = module.__dict__  # past `nn.Module.__getattr__`, which is slow to say no
    return all(
        type(hook) is StandingHook
        for name in ("_forward_hooks", "_forward_pre_hooks")
        for hook in own[name].values()
    )


def hooked(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one has hooks, which may change its gradient or wait for it."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first parameter."""
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
