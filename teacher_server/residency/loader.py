"""Reading models: one at a time, on a thread, within a time limit.

Libraries set process-wide defaults (dtype, device) while they read a model, so two models must not be read at once. A
thread cannot be interrupted: if it takes too long it is given up, but it keeps the turn until it ends.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from opd.errors import DeadlineError, UnavailableError

_log = logging.getLogger(__name__)

R = TypeVar("R")


class Loader:
    """Gives out turns for reading models.

    Args:
        seconds: limit on a turn, and on the wait for it.
        closing: whether the process is about to end, so that threads are no longer waited for.
    """

    def __init__(self, seconds: float, closing: Callable[[], bool] = lambda: False) -> None:
        self._seconds = seconds
        self._closing = closing
        self._lock = asyncio.Lock()
        self._given_up = ""

    @property
    def busy(self) -> bool:
        """Whether a model is being read."""
        return self._lock.locked()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator["Turn"]:
        """Hold the turn during the context.

        Raises:
            UnavailableError: if a thread that was given up holds the turn, or another model takes too long.
        """
        if self._given_up:
            raise UnavailableError(
                f"{self._given_up} is still loading after {self._seconds:g} s and cannot be interrupted; restart the "
                "server to load another model, or wait for the end."
            )
        try:
            async with asyncio.timeout(self._seconds):  # wait_for may swallow a cancellation in Python 3.11
                await self._lock.acquire()
        except TimeoutError:
            raise UnavailableError(f"another model has been loading for {self._seconds:g} s; retry later.") from None
        turn = Turn(self)
        try:
            yield turn
        finally:
            if turn.running is None:  # otherwise a thread is still reading, and `_leave` releases the lock when it ends
                self._lock.release()


class Turn:
    """One turn of a `Loader`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.running: asyncio.Future[Any] | None = None

    async def read(self, what: str, work: Callable[[], R], discard: Callable[[R], object] = lambda result: None) -> R:
        """The result of `work()` on a thread. A cancelled caller waits for its end, unless the process is about to end.

        Args:
            what: what is read, for messages; for example "model models/math".
            work: reads a model.
            discard: called with a result that came too late or that a cancelled caller does not take.

        Raises:
            DeadlineError: if it takes longer than the loader's limit.
        """
        loader, began = self._loader, time.monotonic()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            # `wait` leaves the task alone on a timeout, which is needed as a thread cannot be cancelled.
            done, _ = await asyncio.wait((task,), timeout=loader._seconds)
        except asyncio.CancelledError:
            try:
                if not loader._closing():
                    await asyncio.wait((task,), timeout=loader._seconds)
            finally:
                self._leave(what, task, discard, began)
            raise
        if not done:
            self._leave(what, task, discard, began)
            raise DeadlineError(
                f"{what} did not load within {loader._seconds:g} s; check the model, or raise engine.load_seconds."
            )
        return task.result()

    def _leave(self, what: str, task: "asyncio.Future[R]", discard: Callable[[R], object], began: float) -> None:
        """Discard the task's result whenever it arrives, and keep the turn until then; `began` is when it started."""
        if task.done():
            _discard(task, discard)
            return
        extra = {"model": what, "seconds": round(time.monotonic() - began, 1)}
        if self._loader._closing():
            _log.info("ended while a model was being read", extra=extra)
        else:
            _log.error("gave up reading a model", extra=extra)
        self._loader._given_up, self.running = what, task

        def end(done: "asyncio.Future[R]") -> None:
            self._loader._given_up = ""
            self._loader._lock.release()
            _discard(done, discard)

        task.add_done_callback(end)


def _discard(task: "asyncio.Future[R]", discard: Callable[[R], object]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


async def run_to_completion(work: Awaitable[R]) -> R:
    """The result of `work`. A caller that is cancelled waits for its end too, and is cancelled only then.

    A client may leave at any `await`. Without this it could leave weights half swapped behind, or a teacher whose
    engine sleeps while its state says otherwise; and what runs on a thread cannot be stopped anyway.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.shield(task)
        raise
