"""Waiting for space on a full disk: the run keeps everything in memory instead of ending without its last steps."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from opd.errors import ConfigError, DiskFullError, OutputError, one_line
from opd.files import check_writable, lock

T = TypeVar("T")
_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_POLL_SECONDS = 0.2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


def is_full(error: BaseException) -> bool:
    """Whether `error` means that a disk or quota is full; errors of some libraries say so only in their text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_SPACE
    # safetensors and tokenizers write the first form; the error of `shutil.copytree` quotes those of all its files.
    told = str(error)
    return any(f"(os error {number})" in told or f"[Errno {number}]" in told for number in _NO_SPACE)


def tight(folder: Path, checkpoint: float, keep: int) -> str:
    """A warning if the checkpoints of a run do not fit the disk, "" if they do.

    Args:
        folder: the run folder, which need not exist yet.
        checkpoint: bytes of one checkpoint.
        keep: checkpoints that are kept; while one is written, there is one more.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""  # what cannot be asked is not said to be full
    need = (keep + 1) * checkpoint
    if need <= free:
        return ""
    return (
        f"{keep + 1} checkpoints of {checkpoint / 1e9:.3g} GB need {need / 1e9:.3g} GB, but {place} has "
        f"{free / 1e9:.3g} GB free; free space, lower train.keep_checkpoints, or choose another run folder"
    )


@contextmanager
def drafted(draft: Path, what: str) -> Iterator[None]:
    """Own the folder `draft`, empty at first, which the block fills and then renames; remove it if the block fails.

    Args:
        draft: the folder; what a process that was killed left there is removed.
        what: what it becomes, with its name, for the message.

    Raises:
        OutputError: if another process fills the same draft or took the name first, or if the disk is full.
    """
    draft.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(draft, os.O_RDONLY)
    try:
        # The lock of the folder itself leaves no file behind, and stays while the folder is renamed.
        if not lock(draft, descriptor):
            raise OutputError(f"another process is writing {what}; wait until it ends, or choose another.")
        try:
            for left in draft.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield
        except BaseException as error:
            shutil.rmtree(draft, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _TAKEN:
                raise OutputError(f"{what} was written by another process meanwhile; choose another.") from error
            if is_full(error):
                raise OutputError(
                    f"{what} cannot be written: {one_line(error)}; free space there, or choose another."
                ) from error
            raise
    finally:
        os.close(descriptor)


def check_new(out: Path) -> None:
    """Check that a folder that does not exist yet can be made, before the work for it begins; then `drafting` makes it.

    Raises:
        ConfigError: if it exists.
        OutputError: if it cannot be written.
    """
    if out.exists():
        raise ConfigError(f"folder {str(out)!r} exists already; give another one or remove it.")
    check_writable(out, f"folder {str(out)!r}")


@contextmanager
def drafting(out: Path) -> Iterator[Path]:
    """The draft of the folder `out`, which the block fills and which then becomes it; an interrupted block leaves none.

    Raises:
        OutputError: as `drafted`.
    """
    part = out.with_name(out.name + ".part")
    with drafted(part, f"folder {str(out)!r}"):
        yield part
        part.rename(out)


class Space:
    """Repeats work that fails because of a full disk until there is space.

    Args:
        patience: maximum total seconds to wait for one piece of work; 0 not to wait.
        stopping: returns whether the run was asked to stop, in which case it does not wait.
        log: called with a line for the console.
    """

    def __init__(
        self,
        patience: float = 0.0,
        stopping: Callable[[], bool] = lambda: False,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._patience, self._stopping, self._log = patience, stopping, log

    def until_written(self, work: Callable[[], T], any_rank: Callable[[bool], bool] = bool) -> T:
        """The result of `work`, which is repeated from the start until it succeeds.

        Args:
            work: raises `DiskFullError` if the disk is full, on all ranks that do it together.
            any_rank: returns whether a flag is true on any of these ranks, so that all wait equally long.

        Raises:
            DiskFullError: if there is no space in time, or the run is to stop.
        """
        begin, pause = time.monotonic(), _FIRST_SECONDS
        while True:
            try:
                result = work()
            except DiskFullError as error:
                waited = time.monotonic() - begin
                if any_rank(waited >= self._patience or self._stopping()):
                    raise
                if pause == _FIRST_SECONDS:
                    # Its last part advises on how to go on after the end, which this is not.
                    said = str(error).partition(";")[0]
                    self._log(
                        f"warning: {said}; the run waits up to {self._patience:.0f} s (train.disk_patience) for "
                        "space: free some there."
                    )
                self._sleep(min(pause, self._patience - waited))
                pause = min(2 * pause, _LONGEST_SECONDS)
            else:
                if pause > _FIRST_SECONDS:
                    self._log(f"there is space again after {time.monotonic() - begin:.0f} s, so the run continues")
                return result

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self._stopping():
            time.sleep(min(_POLL_SECONDS, left))
