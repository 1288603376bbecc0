"""Which signals ask a command to stop, and that they reach the first process of a container."""

import signal
import subprocess
import sys

import pytest

from opd.signals import NOTICES, stop_signals

INIT = """
import os, signal, sys
os.getpid = lambda: 1
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)
from opd.signals import end_as_init
end_as_init()
print("started", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
signal.sigwait({signal.SIGCHLD})  # in C, as while a library is imported
"""


def test_signals_that_are_ignored_stay_so_except_for_the_first_two() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGHUP, *NOTICES)}
    try:
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_process_of_a_container_ends_at_the_first_signal(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", INIT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.communicate()
