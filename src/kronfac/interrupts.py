"""Signals that wait: in the middle of a step, Ctrl-C is noted, and raised where nothing is half done.

Python runs a signal's handler between any two of its instructions, so that a KeyboardInterrupt may also
fall into what puts parameters back, or into the end of a `with` block, and torch's own contexts would be
left open. While a step runs, the handlers are therefore replaced by one that takes a note. `poll`, which
every part of a step begins with, calls the real handler; so does the end of the step. While the user's own
closure runs, their handlers are in place.
"""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
"""Signals that handlers written in Python are common for; those without one are left alone."""
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))

Handler = Callable[[int, FrameType | None], Any]


class Waiting:
    """A context in which signals wait; in the main thread, which alone gets them."""

    innermost: "Waiting | None" = None
    """The one whose handlers are in place."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._received: list[tuple[int, FrameType | None]] = []
        self._outer: Waiting | None = None

    def __enter__(self) -> "Waiting":
        if threading.current_thread() is threading.main_thread():
            self._outer, Waiting.innermost = Waiting.innermost, self
            self.install()
        return self

    def __exit__(self, *error: object) -> None:
        if Waiting.innermost is self:
            self.remove()
            Waiting.innermost = self._outer
            self.deliver()

    def install(self) -> None:
        """Put the handler that takes notes in the place of those that are there."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:
                try:
                    signal.signal(number, self._note)
                except ValueError:  # not the main interpreter
                    return
                self._handlers[number] = handler

    def remove(self) -> None:
        """Put the handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def deliver(self) -> None:
        """Call the handlers of what has come meanwhile, which as a rule raise.

        Those that were in place when it came are called, or, if they have been put back, those that are.
        """
        received, self._received = self._received, []
        for number, frame in received:
            handler = self._handlers.get(number) or signal.getsignal(number)
            if callable(handler):
                handler(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, frame))


def poll() -> None:
    """Let what waits be raised here; called where nothing is half done."""
    waiting = Waiting.innermost
    if waiting is None or not waiting._received:
        return
    if threading.current_thread() is threading.main_thread():
        waiting.deliver()


class Allowed:
    """A context, inside of `Waiting`, in which signals do not wait: for code that is the user's."""

    def __enter__(self) -> None:
        self._waiting = None
        if threading.current_thread() is threading.main_thread():
            self._waiting = Waiting.innermost
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting.deliver()

    def __exit__(self, *error: object) -> None:
        if self._waiting is not None:
            self._waiting.install()
