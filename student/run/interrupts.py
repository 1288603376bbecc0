"""Signals: the first is a request to stop after saving, a second one ends the process at once."""

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
from opd.signals import NOTICES, stop_signals
from opd.telemetry import logs

_ECHO_SECONDS = 3.0
"""A launcher forwards a signal that its ranks already had, as from a terminal: within this time it is the same one."""
_SETTLE_SECONDS = 10.0
"""How long a run without anything to save may take to end; Kubernetes kills after 30 s."""
_ADVICE = b"\nstopping as soon as the state can be saved; a second signal ends the run at once\n"
_TORCHRUN = b"torchrun kills the ranks %d s after it was told to stop (--shutdown-timeout)\n"
_NOTHING = b"\nstopping; there is nothing to save yet\n"
_STUCK = b"\nended by a signal before there was anything to save\n"
_GIVEN_UP = b"\nended by a second signal, without saving; --resume goes on from the last checkpoint\n"


class Interrupts:
    """Turns the first stop signal into a request to stop after saving; a second one ends the process at once.

    Notices of schedulers (`opd.signals.NOTICES`) only request. While there is nothing to save, the first signal ends
    the process within seconds, wherever it is.

    Python runs a signal's handler in the main thread between two bytecode instructions. A main thread that waits for
    other ranks in a collective may not get there for minutes. A separate thread therefore counts the signals, whose
    numbers Python's C code writes to a socket as they arrive.

    Attributes:
        requested: whether to stop.
        holding: whether `poll` must not interrupt, because weights have moved within a step.
        shared: whether there are other ranks; `poll` then does not interrupt, because all must stop at the same step.
        starting: whether a signal raises CancelledError in the main thread, because nothing polls yet.
        unsaved: whether there is nothing to save, so that the process may end anywhere.

    Args:
        starting: whether this begins with both of the last two.
        shared: see above.
    """

    watching: ClassVar[int] = 0

    def __init__(self, *, starting: bool = False, shared: bool = False) -> None:
        self.starting = self.unsaved = starting
        self.requested = False
        self.shared = shared
        self.holding = False
        self._launched = "LOCAL_RANK" in os.environ
        self._speaks = os.environ.get("RANK", "0") == "0"
        # Its flag --shutdown-timeout is not told to the ranks, only this variable is.
        seconds = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        self._torchrun_seconds = int(seconds) if "TORCHELASTIC_RUN_ID" in os.environ and seconds.isdigit() else None
        self._raised = False
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
        first, self._raised = not self._raised, True
        self.requested = True
        if self.starting and first:
            raise CancelledError(
                "stopped by a signal before there was anything to save; start it again, with --resume if its "
                "run folder exists."
            )

    def _watch(self) -> None:
        assert self._sockets is not None
        reader = self._sockets[0]
        since: float | None = None  # the time of the first signal apart from notices
        told = False
        deadline: float | None = None
        while True:
            reader.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            try:
                received = reader.recv(1)
            except TimeoutError:
                if self.unsaved:
                    self._log(_STUCK)
                    os._exit(CancelledError.exit_code)
                deadline = None
                continue
            if not received:
                return
            if received[0] not in self._previous:
                continue  # every signal with a Python handler is written to the socket
            if not told:
                self.requested = told = True
                self._tell()
                deadline = time.monotonic() + _SETTLE_SECONDS if self.unsaved else None
            if received[0] in NOTICES:
                continue
            now = time.monotonic()
            if since is None:
                since = now
            elif not (self._launched and now - since < _ECHO_SECONDS):
                self._log(_STUCK if self.unsaved else _GIVEN_UP)
                os._exit(128 + received[0])  # the exit status that a shell reports for a process ended by a signal

    def _tell(self) -> None:
        if self.unsaved:
            self._log(_NOTHING)
        else:
            self._log(_ADVICE + (_TORCHRUN % self._torchrun_seconds if self._torchrun_seconds else b""))

    def _log(self, text: bytes) -> None:
        if self._speaks:
            with contextlib.suppress(OSError):
                os.write(2, logs.line(text.decode()) if logs.is_json() else text)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep `poll` from raising within the block; a request remains pending."""
        self.holding = True
        self.unsaved = False  # weights move
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
