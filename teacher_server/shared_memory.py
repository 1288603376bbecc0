"""The server's half of the shared-memory path: segments below /dev/shm that never outlive their use.

Fresh pages cost more than the copy into them, so segments are used again. Each has a name of the server's own and,
while a reader may have it, a second one: a hard link that the reader unlinks when it has copied the bytes. The number
of links tells the server that the segment is its own again; no message does.

What readers leave is unlinked when its call ends badly, after a time, when the server stops, and, should the server die
by SIGKILL, by a janitor: a small process that waits for the end of its standard input, which the kernel closes together
with the server. Should the janitor be killed too, the next server on the host removes what is left: a server holds a
lock on its marker file for as long as it lives.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opd.wire.shm import SHM_ROOT, host_identity, is_marker
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.observe.logs import log

LIFETIME_SECONDS = 60.0
"""A client that has not taken a segment by then will not."""

IDLE_SECONDS = 10.0
"""A segment that nobody needed for so long gives its memory back."""

MAX_SLACK = 4
"""A segment so many times larger than its tensors is not used for them."""

_JANITOR = """
import glob, os, sys
sys.stdin.buffer.read()
for path in glob.glob(sys.argv[1] + "*"):
    try:
        os.unlink(path)
    except OSError:
        pass
"""


@dataclass(slots=True, eq=False)
class Segment:
    """A piece of shared memory.

    Attributes:
        name: the server's own, below /dev/shm.
        size: bytes of it.
        lent: the reader's name, "" while nobody has claimed it.
        since: when it was claimed or came back, seconds, monotonic.
        made: whether its file exists.
        filling: whether a thread writes into it.
        filled: whether the reader's name exists, or did.
        dropped: whether it must not be used again.
    """

    name: str
    size: int
    lent: str = ""
    since: float = 0.0
    made: bool = False
    filling: bool = False
    filled: bool = False
    dropped: bool = False


class SharedMemory:
    """Segments of one server; used from the event loop, except for `fill`, which belongs on a thread.

    Args:
        max_bytes: in /dev/shm at once; 0 turns the path off.

    Attributes:
        token: for `GetLoad`; "" when off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.token = ""
        self._max_bytes = max_bytes
        self._segments: list[Segment] = []
        self._lock = threading.Lock()
        self._counter = 0
        self._prefix = ""
        self._janitor: subprocess.Popen[bytes] | None = None
        self._marker = -1
        identity = host_identity()
        if max_bytes <= 0 or not identity:
            return
        nonce = secrets.token_hex(16)
        self._prefix = f"opd-{nonce}"
        try:
            self._janitor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _JANITOR, str(SHM_ROOT / self._prefix)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Signals to the server's group must not end the janitor before it has work.
                start_new_session=True,
            )
            _sweep_dead_servers()
            self._marker = _create(self._prefix, 0)
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log("warning", "shared memory is off", reason=error)
            self.close()
            return
        self.token = f"{identity}:{nonce}"

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments, lent or idle."""
        return sum(segment.size for segment in self._segments)

    def claim(self, size: int) -> Segment | None:
        """A segment for `size` bytes, to be filled; None when there is no room, and tensors must travel as chunks."""
        if not self.token or size == 0:
            return None
        self.sweep()
        idle = [segment for segment in self._segments if not segment.lent]
        fitting = [segment for segment in idle if size <= segment.size <= MAX_SLACK * size]
        if fitting:
            segment = min(fitting, key=lambda segment: segment.size)
        else:
            rounded = _rounded(size) if _rounded(size) <= self._max_bytes else size
            for longest in sorted(idle, key=lambda segment: segment.since):
                if self.used_bytes + rounded > self._max_bytes:
                    self._drop(longest)
            if self.used_bytes + rounded > self._max_bytes:
                return None
            segment = Segment(self._next_name(), rounded)
            self._segments.append(segment)
        segment.lent, segment.since, segment.filled = self._next_name(), time.monotonic(), False
        return segment

    def fill(self, segment: Segment, buffers: Sequence[memoryview]) -> list[pb.SharedTensor] | None:
        """Write tensors into a claimed segment; returns where they lie, None when they must travel as chunks."""
        with self._lock:
            if segment.dropped:
                return None
            segment.filling = True
        places = []
        try:
            # Open while it is written only: segments that readers leave would else use up the descriptors.
            fd = _open(segment.name) if segment.made else _create(segment.name, segment.size)
            segment.made = True
            offset = 0
            try:
                for buffer in buffers:
                    places.append(pb.SharedTensor(name=segment.lent, offset=offset))
                    _write(fd, buffer, offset)
                    offset += len(buffer)
            finally:
                os.close(fd)
            os.link(SHM_ROOT / segment.name, SHM_ROOT / segment.lent)
            segment.filled = True
        except OSError as error:
            log("warning", "shared memory is full", reason=error)
            segment.dropped = True
        with self._lock:
            segment.filling = False
            if segment.dropped:
                _remove(segment)
                return None
        return places

    def discard(self, lent: str) -> None:
        """Drop the segment that is lent under this name, if it still is.

        It is not used again: a reader whose call failed may be copying from it still.
        """
        for segment in [segment for segment in self._segments if segment.lent == lent]:
            self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self._segments.remove(segment)
        with self._lock:
            segment.dropped = True
            if not segment.filling:  # else the thread that writes removes it
                _remove(segment)

    def sweep(self) -> None:
        """Take back segments that were read; drop those that readers left and those that nobody needs."""
        now = time.monotonic()
        for segment in list(self._segments):
            if segment.filled and segment.lent and _links(segment.name) == 1:
                segment.lent, segment.since = "", now
            if segment.dropped or now - segment.since > (LIFETIME_SECONDS if segment.lent else IDLE_SECONDS):
                self._drop(segment)

    def close(self) -> None:
        """Unlink everything and end the janitor."""
        self.token = ""
        for segment in list(self._segments):
            self._drop(segment)
        if self._marker >= 0:
            os.close(self._marker)
            self._marker = -1
        _unlink(self._prefix)
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            self._janitor.wait(timeout=30)
            self._janitor = None

    def _next_name(self) -> str:
        self._counter += 1
        return f"{self._prefix}-{self._counter}"


def _rounded(size: int) -> int:
    """`size` rounded up by at most a quarter, so that sequences of similar length can share segments."""
    step = max(mmap.PAGESIZE, 1 << max(size.bit_length() - 3, 0))
    return -(-size // step) * step


def _create(name: str, size: int) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(SHM_ROOT / name, flags, 0o600)
    try:
        if size:
            # Reserves the pages now: writing into a full tmpfs would otherwise fail half way.
            os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(name: str) -> int:
    return os.open(SHM_ROOT / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)


def _links(name: str) -> int:
    try:
        return os.stat(SHM_ROOT / name).st_nlink
    except OSError:
        return 0


def _write(fd: int, buffer: memoryview, offset: int) -> None:
    # Not through a map: whoever may open the file may cut it, and touching a page that is gone kills the process.
    while len(buffer):
        done = os.pwrite(fd, buffer, offset)
        buffer, offset = buffer[done:], offset + done


def _remove(segment: Segment) -> None:
    for name in (segment.lent, segment.name):
        _unlink(name)


def _unlink(name: str) -> None:
    if name:
        with contextlib.suppress(OSError):
            (SHM_ROOT / name).unlink()


def _sweep_dead_servers() -> None:
    """Unlink markers that no living server locks, and the segments that go with them."""
    for marker in SHM_ROOT.glob("opd-*"):
        if not is_marker(marker.name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(marker, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in SHM_ROOT.glob(f"{marker.name}-*"):
                    left.unlink(missing_ok=True)
                marker.unlink()
            finally:
                os.close(fd)
