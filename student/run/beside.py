"""One piece of work in a thread beside the loop, and how long the loop waited for it."""

import threading
import time
from collections.abc import Callable


class Beside:
    """Does one thing at a time.

    Attributes:
        seconds: that the last one took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin `work`; what was begun before must have been waited for."""
        if self._thread is not None:
            raise TypeError("the work before is not waited for")

        def run() -> None:
            begin = time.monotonic()
            try:
                work()
            except BaseException as error:  # raised by `wait`
                self._error = error
            self.seconds = time.monotonic() - begin

        # It ends with the process: a checkpoint that is not whole has no name yet.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether it is not done yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it is done; nothing where nothing was begun.

        Raises:
            BaseException: what ended it.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
