"""A server's throughput, measured from its answers while it is busy."""

import math

_MEMORY_SECONDS = 20.0
FIRST_SPEED = 1000.0
"""Tokens per second that a server is assumed to process before any is measured; only ratios of speeds matter."""


class Throughput:
    """Tokens per second over about the last twenty busy seconds; a stall lowers it while it lasts."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._mark: float | None = None

    def busy(self, now: float) -> None:
        """Note that work is in flight from now on; no effect if it was already."""
        if self._mark is None:
            self._mark = now

    def idle(self) -> None:
        """Note that nothing is in flight any more."""
        self._mark = None

    def answered(self, tokens: int, now: float) -> None:
        """Note that `tokens` tokens were answered now."""
        elapsed = 0.0 if self._mark is None else max(0.0, now - self._mark)
        # Tokens and seconds decay alike, so their ratio is a mean that forgets with a time constant of 20 busy seconds.
        keep = math.exp(-elapsed / _MEMORY_SECONDS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + elapsed
        self._mark = now

    def since_answer(self, now: float) -> float:
        """Busy seconds since the last answer, or since work arrived."""
        return 0.0 if self._mark is None else max(0.0, now - self._mark)

    def forget(self) -> None:
        """Start over, for another process or other hardware."""
        self._tokens = self._seconds = 0.0

    def speed(self, now: float) -> float | None:
        """Tokens per second; None before anything was measured."""
        if self._tokens <= 0.0:
            return None
        # The current wait counts too; otherwise a server that hangs would keep its speed.
        return self._tokens / max(self._seconds + self.since_answer(now), 1e-6)
