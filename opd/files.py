"""Checking that a file can be written, writing it atomically, and letting others read it."""

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from opd.errors import ConfigError, OutputError


def check_out(out: Path, *, option: str = "--out") -> None:
    """Check before the work begins that the file `out` can be written after it.

    Args:
        out: the file.
        option: the option that names it.

    Raises:
        ConfigError: if `out` is a folder, or its parent folder does not exist.
        OutputError: if it cannot be written.
    """
    if out.is_dir():
        raise ConfigError(f"{option} {out} is a folder; name a file in it.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {option} {out} does not exist; create {out.parent} first.")
    check_writable(out, f"{option} {out}")


def check_writable(path: Path, what: str, fix: str = "choose another") -> None:
    """Check before the work begins that the file or folder `path` can be created, or written if it exists.

    Args:
        path: its path; folders above it that do not exist can be created too.
        what: what it is, with its name, for the message.
        fix: what to do, likewise.

    Raises:
        OutputError: if it cannot; the message names the folder that cannot be written.
    """
    if path.exists() and not path.is_dir():  # a file, or a device such as /dev/stdout
        if not os.access(path, os.W_OK):
            raise OutputError(f"{what} cannot be written: Permission denied; {fix}.")
        return
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        # Checked by writing, because a file system may be read-only or full whatever the permissions say.
        with tempfile.TemporaryDirectory(prefix=".opd-", dir=place):
            pass
    except OSError as error:
        because = "" if place == path.absolute() else f", because {place} cannot be written"
        raise OutputError(f"{what} cannot be written{because}: {error.strerror}; {fix}.") from error


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write `content` to `path` as `whole` does; text as `as_bytes` encodes it.

    Raises:
        FileExistsError: if it is to be new and exists.
        OSError: if the file cannot be written.
    """
    with whole(path, new=new) as file:
        file.write(as_bytes(content) if isinstance(content, str) else content)


def write_out(path: Path, content: str) -> None:
    """Write a command's output to the file that its user named, atomically unless it is a link or a device.

    Raises:
        OSError: if the file cannot be written.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):  # such as /dev/stdout, which a rename would replace
        path.write_bytes(as_bytes(content))
    else:
        write_whole(path, content)


def as_bytes(text: str) -> bytes:
    """`text` as UTF-8; an unpaired surrogate, which others' texts may contain, becomes its escape as in JSON."""
    return text.encode("utf-8", errors="backslashreplace")


@contextlib.contextmanager
def whole(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A file that becomes `path` atomically when the block ends; after that, also a power cut leaves the new file.

    If the block fails, or the process is killed, an existing file stays as it was. Several processes and threads may
    write the same path at once, also from several hosts; the last one to finish wins, or the first one if it is `new`.

    Args:
        path: the file.
        new: whether it must not exist yet.

    Raises:
        FileExistsError: if it is to be new and exists.
        OSError: if the file cannot be written.
    """
    # In the same folder, because a rename is atomic only within a file system. At random, because two containers that
    # share a folder may have one process number.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if new:
            _claim(path, scratch)
        else:
            scratch.replace(path)
    finally:
        # On a read-only file system this fails too, even if there is nothing to remove.
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
    # Some network file systems refuse to flush a folder; the file is complete there all the same.
    with contextlib.suppress(OSError):
        flush(path.parent)


def _claim(path: Path, scratch: Path) -> None:
    """Give `scratch` the name `path` too, which no other file must have.

    Raises:
        FileExistsError: if another file has it.
    """
    try:
        os.link(scratch, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        path.open("xb").close()
        scratch.replace(path)


def lock(path: Path, descriptor: int) -> bool:
    """Lock the file or folder `path`, open as `descriptor`, until the last copy of that is closed, without waiting.

    Returns:
        False if another process has the lock, or has removed or renamed `path` since it was opened. True on a file
        system without locks, which must not stop a run.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of `path`; None if that cannot be known, as of a file that is not there."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


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
