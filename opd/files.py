"""Writing small files atomically."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path`, atomically and durably; if that fails, an existing file stays as it was.

    Raises:
        OSError: if the file cannot be written.
    """
    # In the same folder, because a rename is atomic only within a file system.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        # On a read-only file system this fails too, even if there is nothing to remove.
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
