"""Limits on the number of calls that are open at once, over all callers and per caller."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from opd.errors import OverloadedError

RETRY_SECONDS = 1.0


class CallSlots:
    """Slots for open calls; a call that gets none is refused at once.

    Args:
        total: number of slots for all callers together.
        per_caller: most slots that one caller may hold, so that some are left for others.
    """

    def __init__(self, total: int, per_caller: int) -> None:
        self.total = total
        self.per_caller = min(total, per_caller)
        self._held: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Slots in use."""
        return self._held.total()

    def missing(self, caller: str) -> str:
        """Why the caller would get no slot: "caller_full" or "server_full"; "" if it would get one."""
        if self._held[caller] >= self.per_caller:
            return "caller_full"
        return "server_full" if self.used >= self.total else ""

    @contextlib.contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Holds a slot during the context.

        Raises:
            OverloadedError: if all slots, or all that this caller may hold, are in use.
        """
        reason = self.missing(caller)
        if reason == "caller_full":
            raise OverloadedError(
                f"this caller already has {self._held[caller]} open calls, the most it may have; wait for one to end.",
                RETRY_SECONDS,
            )
        if reason:
            raise OverloadedError(
                f"the server already has {self.used} open calls, the most it takes; retry later or ask another "
                "replica.",
                RETRY_SECONDS,
            )
        self._held[caller] += 1
        try:
            yield
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]


class WaitingSlots(CallSlots):
    """Slots with a queue: a call that gets none waits, and the caller that holds the fewest slots goes first.

    A free slot goes to a new call at once even while others wait: those that wait are then at their own limit.
    """

    def __init__(self, total: int, per_caller: int) -> None:
        super().__init__(total, per_caller)
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def wait_for(self, caller: str) -> AsyncIterator[None]:
        """Holds a slot during the context, after waiting for one if necessary."""
        if self.missing(caller):
            entry = (caller, asyncio.get_running_loop().create_future())
            self._waiting.append(entry)
            try:
                await entry[1]
            except asyncio.CancelledError:
                # Cancelled after `set_result` but before its task ran again: it holds a slot that it never used.
                if entry[1].done() and not entry[1].cancelled():
                    self._give_back(caller)
                raise
            finally:
                if entry in self._waiting:
                    self._waiting.remove(entry)
        else:
            self._held[caller] += 1
        try:
            yield
        finally:
            self._give_back(caller)

    def _give_back(self, caller: str) -> None:
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        able = [entry for entry in self._waiting if not entry[1].done() and not self.missing(entry[0])]
        if able:
            entry = min(able, key=lambda waiting: self._held[waiting[0]])  # the first of equals
            self._waiting.remove(entry)
            self._held[entry[0]] += 1  # here, not when its task wakes up, so that no call can take the slot in between
            entry[1].set_result(None)
