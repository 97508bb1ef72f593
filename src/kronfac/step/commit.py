"""A step is taken whole or not at all: what belongs to torch is copied first, and put back after an error.

K-FAC's own state is a value (`state.py`): to undo a step is to keep the old one. Parameters, buffers,
random numbers, gradients and what a GradScaler has set are written to in place, and are kept here.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kronfac.distributed import World
from kronfac.errors import RankError
from kronfac.model import Network, RandomState, restore
from kronfac.model.side_effects import is_changed
from kronfac.record import Recorder
from kronfac.report import StepReport
from kronfac.settings import Settings
from kronfac.step.state import State

SET_BY_SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets for the time of a step and leaves if that raises: the next step would
be scaled twice."""


class Stepping(Protocol):
    """What a step reads of a `KFAC`, and what it changes: network, state and report."""

    model: nn.Module
    settings: Settings
    param_groups: list[dict[str, Any]]
    state: Any
    network: Network
    report: StepReport | None
    _state: State
    _recorder: Recorder
    _left_out: set[int]
    """The ids of trainable parameters that are in no group."""
    _warned: set[str]
    """Kinds of warnings that were shown."""
    _wrapped: bool | None
    """Whether something averages gradients over ranks, as DistributedDataParallel does; None if that is
    not known yet."""

    def _become(self, state: State) -> None: ...


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this ends. Python calls its handler in the main thread, between any two lines."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[int, Any]] = []
    try:
        signal.signal(signal.SIGINT, lambda *given: received.append(given))
    except ValueError:  # not the main interpreter
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])


class Snapshot:
    """An optimizer and its model before a step."""

    def __init__(self, optimizer: Stepping) -> None:
        self._optimizer = optimizer
        self._network, self._state = optimizer.network, optimizer._state
        self._report = optimizer.report
        self._shown = {p: dict(entry) for p, entry in optimizer.state.items()}
        self._forget_calls = optimizer._recorder.snapshot()
        self._random = RandomState.current(self._network.device)
        self._buffers = self._network.buffers.before_call("")
        parameters = self._network.parameters
        self._parameters = [(p, p._version, p.detach().clone()) for p in parameters]
        self._gradients: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []
        self.committed = False
        """Whether the step has been taken, so that there is nothing to undo."""

    def keep_gradients(self) -> None:
        """Copy the gradients, which are about to be written to."""
        grads = [(p, p.grad) for p in self._network.parameters]
        self._gradients = [(p, g, None if g is None else g.clone()) for p, g in grads]

    def restore(self) -> None:
        """Make everything what it was; if that fails, once more, and then it is raised."""
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise

    @torch.no_grad()
    def _restore(self) -> None:
        optimizer = self._optimizer
        optimizer.network, optimizer._state = self._network, self._state
        optimizer.report = self._report
        for name in SET_BY_SCALER:
            vars(optimizer).pop(name, None)
        optimizer.state.clear()
        optimizer.state.update(self._shown)
        self._forget_calls()
        self._random.restore()
        restore([kept for kept in self._buffers if is_changed(kept)])
        for p, version, value in self._parameters:
            if p._version != version:
                p.copy_(value)
        for p, gradient, before in self._gradients:
            p.grad = gradient
            if gradient is not None and before is not None:
                gradient.copy_(before)


@contextmanager
def all_or_nothing(optimizer: Stepping) -> Iterator[Snapshot]:
    """After an exception inside, everything is as it was before; unless the step was committed."""
    snapshot = Snapshot(optimizer)
    try:
        yield snapshot
    except BaseException as error:
        if not snapshot.committed:
            with uninterrupted():
                if not isinstance(error, RankError):  # which all ranks know of
                    World.current().abandon()
                snapshot.restore()
        raise
