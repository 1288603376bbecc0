"""Ctrl-C and SIGTERM: a request to stop after saving."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from opd.errors import CancelledError

_ECHO_SECONDS = 1.0
"""A launcher passes on the Ctrl-C that its ranks had from the terminal already."""


class Interrupts:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after saving; a second one kills at once.

    Attributes:
        requested: whether to stop.
        holding: whether a wait is not interrupted, because weights have moved within a step.
        shared: whether other ranks take part: then a wait is not broken off, because all must stop at the same step.
    """

    def __init__(self) -> None:
        self.requested = False
        self.shared = False
        self.holding = False
        self._since = 0.0
        self._launched = "LOCAL_RANK" in os.environ
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._launched and time.monotonic() - self._since < _ECHO_SECONDS:
            return
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested, self._since = True, time.monotonic()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have `poll` raise nothing within the block; the request stays."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False

    def poll(self) -> None:
        """Raise when a stop was requested, it is not held, and this rank is the only one.

        Raises:
            CancelledError: to leave the current stage; weights are those of the last update.
        """
        if self.requested and not self.shared and not self.holding:
            raise CancelledError("stopped by a signal")
