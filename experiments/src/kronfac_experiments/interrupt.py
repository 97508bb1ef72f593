"""Ctrl-C and SIGTERM as a wish to stop after the current iteration."""

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Interrupts:
    """While this context is open, the first signal is remembered and the second one kills as usual.

    Outside of the main thread, where Python does not let signals be handled, it does nothing.

    Args:
        notify: Called at the first signal.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._notify = notify
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._former = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        for other in self._former:
            default = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
            signal.signal(other, default)
        self._notify()
