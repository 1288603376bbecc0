"""Tensors through /dev/shm between a server and a client on one host.

The server's token names the host (boot id), the device number of /dev/shm and a marker file with a random name
below it. A client that sees the same boot id, the same device and the marker itself shares the memory; containers
with a /dev/shm of their own do not. The client unlinks what it has copied, which is how the server learns that it may
write there again; `teacher_server.shared_memory` sees to it that nothing stays behind when either side dies.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from opd.errors import CorruptPayloadError

SHM_ROOT = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MARKER = re.compile(r"opd-[0-9a-f]{32}")
_NAME = re.compile(r"opd-[0-9a-f]{32}-[0-9]{1,20}")


def host_identity() -> str:
    """Boot id and device number of /dev/shm, joined by a colon; "" where there is no such thing."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{SHM_ROOT.stat().st_dev}"
    except OSError:
        return ""


def shared_memory_available(token: str) -> bool:
    """Whether this process shares /dev/shm with the server that gave `token` (`GetLoadResponse`)."""
    identity, _, nonce = token.rpartition(":")
    marker = f"opd-{nonce}"
    return bool(identity) and identity == host_identity() and is_marker(marker) and _is_file(marker)


def is_marker(name: str) -> bool:
    """Whether a name below /dev/shm is that of a server's marker."""
    return bool(_MARKER.fullmatch(name))


def _is_file(name: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(SHM_ROOT / name).st_mode)
    except OSError:
        return False


def take(places: Sequence[tuple[str, int, int]]) -> list[memoryview]:
    """Copy tensors out of shared memory, then unlink their segments, never before.

    It copies rather than maps: a server that changed or cut the segment after the checks could otherwise alter
    numbers already validated, or kill the reader with SIGBUS.

    Args:
        places: (segment name, offset, byte length) of each tensor; tensors may share a segment.

    Raises:
        CorruptPayloadError: for a name outside the server's own naming, a missing segment, or one that is too short.
    """
    files: dict[str, int] = {}
    try:
        views = []
        for name, offset, length in places:
            if name not in files:
                files[name] = _open(name)
            views.append(_read(files[name], name, offset, length))
        return views
    finally:
        for name, fd in files.items():
            os.close(fd)
            (SHM_ROOT / name).unlink(missing_ok=True)


def _open(name: str) -> int:
    if not _NAME.fullmatch(name):
        raise CorruptPayloadError(f"shared segment name {name[:64]!r} is not one a server makes.")
    try:
        # O_NOFOLLOW: a link planted in /dev/shm must not lead the reader elsewhere.
        return os.open(SHM_ROOT / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CorruptPayloadError(f"shared segment {name} cannot be opened: {error.strerror}.") from error


def _read(fd: int, name: str, offset: int, length: int) -> memoryview:
    if offset + length > os.fstat(fd).st_size:
        raise CorruptPayloadError(f"shared segment {name} is shorter than its tensors.")
    view = np.empty(length, np.uint8).data
    done = 0
    while done < length:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise CorruptPayloadError(f"shared segment {name} was cut while it was read.")
        done += got
    return view
