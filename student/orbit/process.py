"""The processes of `opd orbit`: one stage at a time, which ends with the command, and never two runs in one folder."""

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from opd.errors import CancelledError, RunFolderError
from opd.files import lock
from opd.signals import NOTICES, stop_signals
from student.run.with_parent import with_parent


class StageProcesses:
    """A context manager that runs stages in their own processes, locks the run folder, and handles signals.

    The first signal (`opd.signals.stop_signals`) raises CancelledError wherever the command is. A running stage is told
    to save and end, and is waited for; a second signal kills it, unless either is a notice of a scheduler. If the
    command itself is killed, its stage is told to save and end too (on Linux). The stage inherits the lock and holds it
    until it has ended, so it cannot be started twice.

    Args:
        folder: run folder; created on entry if it does not exist.

    Raises:
        RunFolderError: on entry, when another command or a stage of an earlier one still runs in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._requested = self._insisted = self._starting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StageProcesses":
        self._folder.mkdir(parents=True, exist_ok=True)
        # The stage inherits the descriptor (`pass_fds`), and a flock lasts until the last copy of it is closed.
        path = self._folder / ".lock"
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        if not lock(path, self._lock):
            os.close(self._lock)
            raise RunFolderError(
                f"a stage or another command is still running in {self._folder}; wait for it to end, or stop it."
            )
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._lock)

    def run(self, command: Sequence[str]) -> int:
        """Run the command of a stage to its end and return its exit code.

        Raises:
            CancelledError: after a signal, once the stage has saved its state and ended.
        """
        try:
            # A signal between fork and assignment must not raise, or the process would run on with no one to stop it.
            self._starting = True
            # In its own session, so that the terminal's Ctrl-C reaches the stage only once, through this process.
            self._process = subprocess.Popen(with_parent(command), start_new_session=True, pass_fds=(self._lock,))
            self._starting = False
            if self._requested:
                raise CancelledError("stopped by a signal")
            return self._process.wait()
        except CancelledError:
            if self._process is not None:
                self._process.terminate()
                self._process.wait()
            raise
        finally:
            self._starting, self._process = False, None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self._insisted = self._insisted, self._insisted or number not in NOTICES
        if self._requested:
            if self._process is not None and again and number not in NOTICES:
                os.killpg(self._process.pid, signal.SIGKILL)  # a launcher's workers too
            return
        self._requested = True
        if not self._starting:
            raise CancelledError("stopped by a signal")
