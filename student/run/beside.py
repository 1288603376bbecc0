"""Runs one piece of work at a time in a thread besides the loop, such as writing a checkpoint."""

import threading
import time
from collections.abc import Callable


class Beside:
    """A background thread for one piece of work at a time.

    Attributes:
        seconds: how long the last piece of work took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work`; `wait` must have been called for the previous piece."""
        if self._thread is not None:
            raise TypeError("the work before is not waited for")

        def run() -> None:
            begin = time.monotonic()
            try:
                work()
            except BaseException as error:  # raised by `wait`
                self._error = error
            self.seconds = time.monotonic() - begin

        # A daemon thread may die with the process, because an incomplete checkpoint has no name yet.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether the work is still running."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work is done; returns at once if none was started.

        Raises:
            BaseException: whatever the work raised.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
