"""Writing files atomically, and letting others read what was written."""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`, text as UTF-8, atomically; after a return, also a power cut leaves the new file.

    If it fails, or the process is killed, an existing file stays as it was. Several processes and threads may write the
    same path at once, also from several hosts; the last one to finish wins.

    Raises:
        OSError: if the file cannot be written.
    """
    # In the same folder, because a rename is atomic only within a file system. At random, because two containers that
    # share a folder may have one process number.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        # On a read-only file system this fails too, even if there is nothing to remove.
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    # Some network file systems refuse to flush a folder; the file is complete there all the same.
    with contextlib.suppress(OSError):
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file or a folder to disk.

    Raises:
        OSError: if it cannot be flushed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def share(paths: Iterable[Path]) -> None:
    """Give those of `paths` that are files the permissions to read and write that their folder has.

    From version 0.8 on, safetensors writes files that only their owner may read, whatever the umask: a server that runs
    as another user could not load them. A file system that does not let permissions be changed keeps its own.
    """
    for path in paths:
        if path.is_file():
            with contextlib.suppress(PermissionError):
                path.chmod(path.parent.stat().st_mode & 0o666)
