"""Everything that a step may change, kept until it has ended: an exception puts all of it back.

Most of a step only computes (`step.py`), and its state is a value, so that to go back is to take the old
one again. What is written to in place is copied: buffers before the step, parameters before they are moved,
gradients if a step writes to them.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kronfac.gradient_check import GradientCheck
from kronfac.network import Network, RandomState, StandingRecorder, restore
from kronfac.network.side_effects import put_back
from kronfac.report import StepReport
from kronfac.state import State

_NOT_RESTORED = "_given"
"""Warnings that were shown were shown."""

SET_BY_SCALER = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets for the time of a step and leaves if that raises: the next step would
be scaled twice."""


class Stepping(Protocol):
    """What of an optimizer a step may change."""

    network: Network
    report: StepReport | None
    state: Any
    _state: State
    _check: GradientCheck
    _recorder: StandingRecorder


class Before:
    """An optimizer and its model as they were before a step."""

    def __init__(self, optimizer: Stepping) -> None:
        network, check, recorder = optimizer.network, optimizer._check, optimizer._recorder
        self._optimizer = optimizer
        self._network, self._state, self.report = network, optimizer._state, optimizer.report
        self._shown = {p: dict(entry) for p, entry in optimizer.state.items()}
        self._objects = [
            (where, {k: _copied(v) for k, v in vars(where).items() if k != _NOT_RESTORED})
            for where in (check, recorder, recorder.watch, network.learned, network.buffers)
        ]
        self._arrived = [(arrival, arrival.arrived) for arrival in recorder.arrivals]
        self._running = list(recorder.running)
        self._random = RandomState.current(network.device)
        self._buffers = network.buffers.before_call("")
        self._theta: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[nn.Parameter, Tensor | None, Tensor | None]] = []

    def keep_parameters(self) -> None:
        """Copy θ, which is about to be written to; once is enough."""
        if not self._theta:
            self._theta = [(p, p.detach().clone()) for p in self._network.parameters]

    def keep_gradients(self) -> None:
        """Copy the gradients, which are about to be written to."""
        grads = [(p, p.grad) for p in self._network.given]
        self._gradients = [(p, g, None if g is None else g.clone()) for p, g in grads]

    def forget_learned(self) -> None:
        """What was found out about loop and network in a step that is refused does not count."""
        known = (self._optimizer._check, self._network.learned)
        for where, values in self._objects:
            if any(where is one for one in known):
                vars(where).update({k: _copied(v) for k, v in values.items()})

    def put_back(self) -> None:
        """Make everything what it was; if that is interrupted, once more, and then it is raised."""
        try:
            self._put_back()
        except BaseException:
            self._put_back()
            raise

    @torch.no_grad()
    def _put_back(self) -> None:
        optimizer = self._optimizer
        optimizer.network, optimizer._state, optimizer.report = (
            self._network,
            self._state,
            self.report,
        )
        for name in SET_BY_SCALER:
            vars(optimizer).pop(name, None)
        optimizer.state.clear()
        optimizer.state.update(self._shown)
        for where, values in self._objects:
            vars(where).update({k: _copied(v) for k, v in values.items()})
        # torch calls no hook after a call that a KeyboardInterrupt has ended.
        optimizer._recorder.running[:] = self._running
        for arrival, gradient in self._arrived:
            arrival.arrived = gradient
        self._random.restore()
        restore([kept for kept in self._buffers if _written(kept)])
        if self._theta:
            put_back(self._theta)
            self._network.push()
        for p, gradient, value in self._gradients:
            p.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)


def _copied(value: Any) -> Any:
    """A list, a set or a dict that is written to in place, as it is now; whatever else is a value."""
    return value.copy() if type(value) in (list, set, dict) else value


def _written(kept: tuple[nn.Module, str, Tensor, Tensor]) -> bool:
    """Whether a buffer is another than it was; graphs that others have made of the rest stay valid."""
    module, name, buffer, value = kept
    return module._buffers.get(name) is not buffer or not torch.equal(buffer, value)
