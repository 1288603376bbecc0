"""Write small files whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put `text` (UTF-8) into `path`, on disk before it has its name; when that fails, an earlier file stays as it was.

    Raises:
        OSError: when it cannot be written.
    """
    # Beside it, because a rename is atomic within one file system only.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        # On a read-only file system this fails too, even when there is nothing to remove.
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
