"""The server's half of the shared-memory path: segments below /dev/shm that never outlive their use.

A segment is normally unlinked by its reader. What readers leave is unlinked when its call ends badly, after a time,
when the server stops, and, should the server die by SIGKILL, by a janitor: a small process that waits for the end of
its standard input, which the kernel closes together with the server. Should the janitor be killed too, the next server
on the host removes what is left: a server holds a lock on its marker file for as long as it lives.
"""

import contextlib
import fcntl
import os
import secrets
import subprocess
import sys
import time

from opd.wire.shm import SHM_ROOT, host_identity, is_marker
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.logs import log

LIFETIME_SECONDS = 60.0
"""A client that has not taken a segment by then will not."""

_JANITOR = """
import glob, os, sys
sys.stdin.buffer.read()
for path in glob.glob(sys.argv[1] + "*"):
    try:
        os.unlink(path)
    except OSError:
        pass
"""


class SharedMemory:
    """Segments of one server; used from the event loop and from encoder threads, one call at a time per segment.

    Args:
        max_bytes: in /dev/shm at once; 0 turns the path off.

    Attributes:
        token: for `GetLoad`; "" when off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.token = ""
        self._max_bytes = max_bytes
        self._segments: dict[str, tuple[int, float]] = {}
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
            self._marker = self._create(self._prefix, 0)
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            log("warning", "shared memory is off", reason=error)
            self.close()
            return
        self.token = f"{identity}:{nonce}"

    @property
    def used_bytes(self) -> int:
        """Bytes of segments that may still exist."""
        return sum(size for size, _ in self._segments.values())

    def put(self, buffers: list[memoryview]) -> list[pb.SharedTensor] | None:
        """Write tensors into one new segment; None when there is no room, and they must travel as chunks."""
        size = sum(len(buffer) for buffer in buffers)
        self.sweep()
        if not self.token or size == 0 or self.used_bytes + size > self._max_bytes:
            return None
        self._counter += 1
        name = f"{self._prefix}-{self._counter}"
        self._segments[name] = (size, time.monotonic())
        try:
            fd = self._create(name, size)
        except OSError as error:
            log("warning", "shared memory is full", reason=error)
            self.discard(name)
            return None
        places, offset = [], 0
        try:
            for buffer in buffers:
                places.append(pb.SharedTensor(name=name, offset=offset))
                view, start = buffer, offset
                while len(view):
                    done = os.pwrite(fd, view, start)
                    view, start = view[done:], start + done
                offset += len(buffer)
        except OSError as error:
            log("warning", "shared memory is full", reason=error)
            self.discard(name)
            return None
        finally:
            os.close(fd)
        return places

    def discard(self, name: str) -> None:
        """Unlink a segment that nobody will read."""
        self._segments.pop(name, None)
        with contextlib.suppress(OSError):
            (SHM_ROOT / name).unlink()

    def sweep(self) -> None:
        """Forget segments that were taken, unlink those that are too old."""
        now = time.monotonic()
        for name, (_, made) in list(self._segments.items()):
            if now - made > LIFETIME_SECONDS:
                self.discard(name)
            elif not (SHM_ROOT / name).exists():
                self._segments.pop(name, None)

    def close(self) -> None:
        """Unlink everything and end the janitor."""
        self.token = ""
        for name in [*self._segments, self._prefix]:
            if name:
                self.discard(name)
        if self._marker >= 0:
            os.close(self._marker)
            self._marker = -1
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            self._janitor.wait(timeout=30)
            self._janitor = None

    def _create(self, name: str, size: int) -> int:
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
