"""What the server tells the machine that it runs on: memory that it gives back, and its state to a supervisor.

The allocator of glibc keeps what is freed below the highest block in use of each of its arenas, and it has an arena for
nearly every thread. After a load of large requests, that may be more than a gigabyte.
"""

import contextlib
import ctypes
import os
import socket

ENOUGH_BYTES = 64 * 1024 * 1024
"""Bytes that must have been freed before it is worth the time, a few milliseconds per gigabyte."""

ARENAS = 2
MAPPED_BYTES = 8 * 1024 * 1024
"""From this size on, a block is mapped by itself and leaves no hole: a request message, but few tensors of a model."""
_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3
_LIBC = ctypes.CDLL(None)
_TRIM = getattr(_LIBC, "malloc_trim", None)  # other C libraries have no such function


def keep_compact() -> None:
    """Let threads share arenas from now on, so that one can use what another has freed, and map large blocks.

    Otherwise glibc would stop mapping blocks as large as the largest that was freed.
    """
    if _TRIM is not None:
        _LIBC.mallopt(_M_ARENA_MAX, ARENAS)
        _LIBC.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class Allocator:
    """Knows how much was freed before memory was last given back."""

    def __init__(self) -> None:
        self._seen = 0

    def give_back(self, freed: int) -> None:
        """Give memory back if enough was freed since the last time; takes a while, but other threads may run.

        Args:
            freed: bytes freed since the start.
        """
        if freed - self._seen >= ENOUGH_BYTES and _TRIM is not None:
            self._seen = freed
            _TRIM(0)


def notify(**fields: str | int) -> None:
    """Send fields to the supervisor, such as READY=1; does nothing if there is none, or if it does not listen."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    text = "\n".join(f"{name}={value}" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        # A name that begins with @ is in the abstract namespace, where it begins with a null byte.
        to.sendto(text.encode(), "\0" + path[1:] if path.startswith("@") else path)
