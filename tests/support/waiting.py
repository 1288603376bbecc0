"""How tests wait: for conditions and events, with a limit that only a broken program reaches, never for a time."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0
"""Seconds; so long that a busy machine does not reach it."""


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE, *, why: Callable[[], str] = str) -> None:
    """Wait in this thread until `condition` is true.

    Raises:
        AssertionError: when it is still false after `seconds`; `why` says more.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds:.0f} s. {why()}"
        time.sleep(0.01)


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """The same on an event loop, which runs on meanwhile."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not become true in {seconds:.0f} s"
        await asyncio.sleep(0.005)


class EngineGate:
    """As an engine's `before_score`: holds its batches until it is opened.

    Attributes:
        held: batches that have come to the gate.
    """

    def __init__(self) -> None:
        self.held = 0
        self._open = threading.Event()

    def __call__(self, batch: Any) -> None:
        self.held += 1
        assert self._open.wait(PATIENCE), "the gate was never opened"

    def open(self) -> None:
        """Let all batches pass, also those to come."""
        self._open.set()
