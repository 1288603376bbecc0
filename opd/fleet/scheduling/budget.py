"""Budgets for re-issues and hedges, which keep a fleet in trouble from getting even more work."""

import math
import random


class RetryBudget:
    """A budget for re-issues, filled by first attempts (each pays for a tenth by default) and by the passing of time.

    Without it, a fleet that fails under load would get twice the load. A re-issue that finds the budget empty waits; it
    is not given up.

    Args:
        ratio: re-issues that a first attempt pays for.
        rate: re-issues per second that are granted in any case.
        burst: most re-issues that can be saved up.
    """

    def __init__(self, ratio: float, rate: float, burst: float = 64.0) -> None:
        self._ratio = ratio
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at: float | None = None

    def first_attempt(self, rows: int = 1) -> None:
        """Note that `rows` were sent for the first time."""
        self._tokens = min(self._burst, self._tokens + self._ratio * rows)

    def wait_seconds(self, now: float, most: float = math.inf) -> float:
        """Take one re-issue; returns the seconds until it is covered, 0 if it is covered already.

        With a limit `most` on the wait, the debt never grows beyond what `most` seconds pay off.
        """
        if self._at is not None:
            self._tokens = min(self._burst, self._tokens + self._rate * max(0.0, now - self._at))
        self._at = now
        # May be negative: the debt spaces waiting re-issues 1 / rate seconds apart.
        self._tokens = max(self._tokens - 1.0, min(self._tokens, -most * self._rate))
        return min(most, max(0.0, -self._tokens / self._rate))


class HedgeBudget:
    """A budget for hedges: at most `cap` of all rows, except that the very first hedge is always allowed."""

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self.rows = 0
        self.hedged = 0

    def sent(self, rows: int) -> None:
        """Note that `rows` were sent for the first time."""
        self.rows += rows

    def take(self) -> bool:
        """Whether one more row may be hedged; if so, it is counted."""
        if self._cap <= 0.0 or self.hedged + 1 > max(1.0, self._cap * self.rows):
            return False
        self.hedged += 1
        return True


def backoff_seconds(base: float, failures: int, rng: random.Random) -> float:
    """Exponential backoff with equal jitter: base * 2^(failures - 1), at most 5 s, times a uniform draw in [0.5, 1)."""
    return min(5.0, base * 2.0 ** max(0, failures - 1)) * (0.5 + 0.5 * rng.random())


def pushback_seconds(asked: float, refusals: int, rng: random.Random) -> float:
    """Seconds to leave a server alone after a refusal: what it asked for, and longer the more often it has refused.

    The server knows when room appears, but not how many others it has told the same. So the pause grows by half with
    each refusal, up to four times what was asked: were it longer, the server would have room and nothing to do. Up to a
    quarter is added to keep clients apart.

    Args:
        asked: the server's own hint, in seconds.
        refusals: refusals since the last answer, this one included.
        rng: draws the jitter.
    """
    return asked * min(1.5 ** min(refusals - 1, 9), 4.0) * (1.0 + 0.25 * rng.random())
