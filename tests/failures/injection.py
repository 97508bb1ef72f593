"""Exceptions at any operation of a step, signals at any of its lines, and what is left after them."""

import copy
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import kronfac
from kronfac import KFAC
from tests.loop.loops import PROBLEMS
from tests.optimizer.runs import assert_no_hooks, same

PACKAGE = str(Path(kronfac.__file__).parent)


class Injected(BaseException):
    """As KeyboardInterrupt, no Exception."""


class AtOperation(TorchDispatchMode):
    """Raises when the n-th operation is about to be made; counts them if n is None."""

    def __init__(self, n: int | None = None, error: Callable[[], BaseException] = Injected) -> None:
        super().__init__()
        self.n, self.count, self._error = n, 0, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.namespace != "profiler"  # torch's own, around every step
        if self.count == self.n:
            self.n = None
            raise self._error()
        return func(*args, **kwargs or {})


class SignalAtLine:
    """Sends this process a signal when kronfac comes to its n-th line; counts them if n is None.

    Only the lines of functions with this name, if one is given.
    """

    def __init__(
        self, n: int | None = None, number: int = signal.SIGINT, function: str = ""
    ) -> None:
        self.n, self.count, self._number, self._function = n, 0, number, function

    def __enter__(self) -> "SignalAtLine":
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        wanted = self._function in ("", code.co_name) and code.co_filename.startswith(PACKAGE)
        return self._line if wanted else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        self.count += 1
        if self.count == self.n:
            signal.raise_signal(self._number)
        return self._line


@dataclass(frozen=True)
class Everything:
    """What a step may change, copied: parameters, buffers, state, generator, recorder, torch's modes."""

    model: dict[str, Tensor]
    state: dict[str, Any]
    random: Tensor
    report: Any
    recorder: tuple[Any, ...]
    learned: dict[str, Any]
    modes: tuple[Any, ...]
    gradients: list[Tensor | None] | None

    @classmethod
    def of(cls, optimizer: KFAC, gradients: bool = False) -> "Everything":
        """Gradients too for a loop without a closure, which are not the step's to change."""
        recorder = optimizer._recorder
        return cls(
            copy.deepcopy(dict(optimizer.model.state_dict())),
            copy.deepcopy(optimizer.state_dict()),
            torch.get_rng_state(),
            optimizer.report,
            (recorder._paused, recorder.since.forwards, [id(r) for r in recorder.records]),
            copy.deepcopy(vars(optimizer.network.learned)),
            _modes(),
            [_bits(p.grad) for p in optimizer.model.parameters()] if gradients else None,
        )

    def assert_kept(self, optimizer: KFAC) -> None:
        """All of it is as it was, to the bit, and there are no hooks but the standing ones."""
        now = self.assert_parameters_and_state_kept(optimizer)
        assert self.modes == now.modes
        assert now.recorder == self.recorder
        assert same(self.learned, now.learned)
        assert_no_hooks(optimizer.model, optimizer.objective.module)

    def assert_parameters_and_state_kept(self, optimizer: KFAC) -> "Everything":
        """What training goes on from is as it was, to the bit; returns everything as it is now."""
        now = Everything.of(optimizer, self.gradients is not None)
        for name, value in self.model.items():
            assert same(value, now.model[name]), f"{name} changed"
        for key, value in self.state["kfac"].items():
            assert same(value, now.state["kfac"][key]), f"{key} changed"
        assert same(self.state, now.state)
        assert torch.equal(self.random, now.random), "random numbers were drawn"
        assert now.report is self.report
        assert same(self.gradients, now.gradients)
        return now


def _bits(gradient: Tensor | None) -> Tensor | None:
    """A copy of its bytes: NaN is equal to no other."""
    return None if gradient is None else gradient.clone().reshape(-1).view(torch.uint8)


def _modes() -> tuple[Any, ...]:
    """Contexts of torch's, and handlers of signals, that would stay if they were not left."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.autograd.forward_ad._current_level,
        signal.getsignal(signal.SIGINT),
        signal.getsignal(signal.SIGTERM),
    )


@contextmanager
def raising(number: int, error: type[BaseException]):
    """A handler in Python for a signal, that raises; yields a list of the errors that Python ignored.

    It ignores what is raised while a generator that nobody needs any more is closed, Ctrl-C included.
    """
    ignored: list[BaseException] = []

    def handler(*_: object) -> None:
        raise error

    def note(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, error):
            ignored.append(unraisable.exc_value)
        else:
            hook(unraisable)

    before, hook = signal.signal(number, handler), sys.unraisablehook
    sys.unraisablehook = note
    try:
        yield ignored
    finally:
        signal.signal(number, before)
        sys.unraisablehook = hook


@dataclass
class Run:
    """A network in training, and its next step, which can be tried any number of times."""

    optimizer: KFAC
    batches: list[tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    way: str

    @classmethod
    def of(cls, problem: str, way: str, steps: int, **settings: Any) -> "Run":
        """After some steps; `way` is "closure", "own" for `KFAC.closure`, or "loop"."""
        chosen = PROBLEMS[problem]
        model, batches = chosen.model(), chosen.batches(steps + 1)
        optimizer = KFAC(model, chosen.loss_fn, **settings)
        run = cls(optimizer, batches, chosen.loss, way)
        torch.manual_seed(11)
        for k in range(steps):
            run.begin(k)
            run.step(k)
        run.begin(steps)
        return run

    def begin(self, k: int) -> None:
        """What a loop does before the step."""
        if self.way == "loop":
            self.optimizer.zero_grad()
            self.loss(self.optimizer.model, *self.batches[k]).backward()

    def step(self, k: int = -1) -> None:
        x, y = self.batches[k]
        optimizer = self.optimizer

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = self.loss(optimizer.model, x, y)
            value.backward()
            return value

        optimizer.step({"closure": closure, "own": optimizer.closure(x, y), "loop": None}[self.way])

    def assert_same(self, other: "Run") -> None:
        """Both are at the same point, to the bit."""
        assert same(self.optimizer.state_dict(), other.optimizer.state_dict())
        states = (dict(run.optimizer.model.state_dict()) for run in (self, other))
        assert same(*states)
