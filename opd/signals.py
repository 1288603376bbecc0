"""The signals that ask a command to stop."""

import os
import signal
import socket
import threading

NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What schedulers send ahead of a limit, some of them again and again: however many come, they are one request."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a command to stop: SIGINT, SIGTERM, SIGHUP and the notices of schedulers.

    A terminal or an ssh session sends SIGHUP to its commands when it ends. Except for the first two, signals stay as
    they are where they are ignored, as SIGHUP under nohup, or have a handler that Python does not know.
    """
    others = (signal.SIGHUP, *NOTICES)
    kept = [number for number in others if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    return (signal.SIGINT, signal.SIGTERM, *kept)


def end_as_init() -> None:
    """Have signals end this process if it is the first one of a container, where Linux drops those without a handler.

    A command that handles signals itself, to save or to drain, replaces this from then on.
    """
    if os.getpid() != 1 or threading.current_thread() is not threading.main_thread():
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)  # required for a wake-up descriptor
    ours = [number for number in stop_signals() if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own

    threading.Thread(target=_end, args=(reader, writer, ours), name="signals of init", daemon=True).start()


def _end(reader: socket.socket, writer: socket.socket, numbers: list[signal.Signals]) -> None:
    """End the process at the first of these signals; in a thread, because the main thread may be in C code.

    Args:
        reader: where their numbers arrive.
        writer: the wake-up descriptor, open for as long as this thread lives.
        numbers: the signals.
    """
    while (number := reader.recv(1)[0]) not in numbers:
        pass
    os._exit(128 + number)
