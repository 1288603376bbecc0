"""Ctrl-C, SIGTERM and SIGHUP: the first is a request to stop after saving, a second one ends the process at once."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from opd.errors import CancelledError

_ECHO_SECONDS = 3.0
"""A launcher forwards a signal that its ranks already had, as from a terminal: within this time it is the same one."""
_ADVICE = b"\nstopping as soon as the state can be saved; a second signal ends the run at once\n"
_TORCHRUN = b"torchrun kills the ranks %d s after it was told to stop (--shutdown-timeout)\n"
_GIVEN_UP = b"\nended by a second signal, without saving; --resume goes on from the last checkpoint\n"


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup.

    A terminal or an ssh session sends SIGHUP to its commands when it ends.
    """
    wanted = (signal.SIGINT, signal.SIGTERM)
    return wanted if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*wanted, signal.SIGHUP)


class Interrupts:
    """Turns the first of these signals into a request to stop after saving; a second one ends the process at once.

    SIGHUP is left ignored where it was (`stop_signals`).

    Python runs a signal's handler in the main thread between two bytecode instructions. A main thread that waits for
    other ranks in a collective may not get there for minutes. A separate thread therefore counts the signals, whose
    numbers Python's C code writes to a socket as they arrive.

    Attributes:
        requested: whether to stop.
        holding: whether `poll` must not interrupt, because weights have moved within a step.
        shared: whether there are other ranks; `poll` then does not interrupt, because all must stop at the same step.
    """

    watching: ClassVar[int] = 0

    def __init__(self) -> None:
        self.requested = False
        self.shared = False
        self.holding = False
        self._launched = "LOCAL_RANK" in os.environ
        self._speaks = os.environ.get("RANK", "0") == "0"
        # Its flag --shutdown-timeout is not told to the ranks, only this variable is.
        seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        self._torchrun_seconds = int(seconds) if "TORCHELASTIC_RUN_ID" in os.environ and seconds.isdigit() else None
        self._previous: dict[int, Any] = {}
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._previous_fd = -1
        self._watcher = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._sockets = socket.socketpair()
            self._sockets[1].setblocking(False)  # required for a wake-up descriptor, as a full buffer must not block
            self._previous_fd = signal.set_wakeup_fd(self._sockets[1].fileno(), warn_on_full_buffer=False)
            self._previous = {number: signal.signal(number, self._handle) for number in stop_signals()}
            self._watcher.start()
            Interrupts.watching += 1
        return self

    def __exit__(self, *_: object) -> None:
        if self._sockets is None:
            return
        Interrupts.watching -= 1
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd, warn_on_full_buffer=False)
        reader, writer = self._sockets
        writer.close()  # ends the watcher
        self._watcher.join()
        reader.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler is needed: without one, the signal has its default effect and is not written to the descriptor.
        self.requested = True

    def _watch(self) -> None:
        assert self._sockets is not None
        since: float | None = None
        while received := self._sockets[0].recv(1):
            if received[0] not in self._previous:
                continue  # every signal with a Python handler is written to the socket
            now = time.monotonic()
            if since is None:
                self.requested, since = True, now
                self._log(_ADVICE + (_TORCHRUN % self._torchrun_seconds if self._torchrun_seconds else b""))
            elif not (self._launched and now - since < _ECHO_SECONDS):
                self._log(_GIVEN_UP)
                os._exit(128 + received[0])  # the exit status that a shell reports for a process ended by a signal

    def _log(self, text: bytes) -> None:
        if self._speaks:
            with contextlib.suppress(OSError):
                os.write(2, text)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep `poll` from raising within the block; a request remains pending."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False

    def poll(self) -> None:
        """Raise if a stop was requested, unless it is held or there are other ranks.

        Raises:
            CancelledError: to leave the current stage; the weights are those of the last update.
        """
        if self.requested and not self.shared and not self.holding:
            raise CancelledError("stopped by a signal")


def _leave_parent() -> None:
    """In a forked child, stop counting its signals as its parent's."""
    if Interrupts.watching:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_parent)
