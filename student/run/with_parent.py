"""Runs a command that does not outlive the process that started it, even if that is killed (Linux).

    python -m student.run.with_parent COMMAND ...     becomes COMMAND, which gets SIGTERM when its parent ends

The kernel sends the signal (PR_SET_PDEATHSIG, prctl(2)), so it comes after SIGKILL and a crash too. It comes when the
*thread* that started the command ends: start it from a thread that lives as long as the command should. On other
systems than Linux the command simply runs.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def with_parent(command: Sequence[str]) -> list[str]:
    """The command that runs `command` for as long as this process lives."""
    if sys.platform != "linux":
        return list(command)
    # By its path: importing the package would take longer than the rest of the work.
    return [sys.executable, "-I", __file__, str(os.getpid()), *command]


def _main(parent: int, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:  # otherwise the parent ended before the line above, and no signal will arrive
        os.execvp(command[0], command)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
