"""Checkpoints that survive a kill at any instant: written to a scratch folder, fsynced, sealed by a manifest, renamed.

    checkpoints/step-000050/model/     a Hugging Face folder, loads with plain transformers
    checkpoints/step-000050/trainer/   optimizer, random states, loop and methods: safetensors and JSON; folders
                                       *-shards have what the ranks of a sharded student hold
    checkpoints/step-000050/manifest.json   format number, SHA-256 and size of every file; a folder without it is not a
                                            checkpoint

A checkpoint that does not match its manifest is skipped in favour of the previous one; one of another format is
refused. Ranks write and hash their parts (`student.state.parts`) of one folder, which all of them see, and agree after
each part, so that a rank that cannot write leaves no other rank waiting. Rank 0 renames the folder when all are done.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from opd.errors import CheckpointError, DiskFullError, RunFolderError, one_line
from opd.files import flush, share
from student.model.ranks import ALONE, Ranks
from student.run.space import is_full
from student.state.parts import Part

T = TypeVar("T")
log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = 3
"""Raised when a change of the code reads the files of a checkpoint in another way."""
_ASIDE = ".writing-old-"


def save_checkpoint(
    root: Path,
    step: int,
    parts: Iterable[Part],
    *,
    keep: int,
    ranks: Ranks = ALONE,
    then: str = "continue with --resume",
) -> Path:
    """Write the checkpoint of `step` and remove all but the newest `keep` up to it.

    Args:
        root: folder of all checkpoints.
        step: steps done.
        parts: what this rank writes; each part is gathered after the previous one has been written.
        keep: number of checkpoints to keep, at least 1.
        ranks: the ranks that write together; each has equally many parts.
        then: advice for the error message if the checkpoint cannot be written.

    Returns:
        The checkpoint's folder.

    Raises:
        RunFolderError: on every rank, if one cannot write its part; it names rank and path. Earlier checkpoints stay.
        DiskFullError: likewise, if the disk is full.
    """
    final = root / f"step-{step:06d}"
    main = ranks.index == 0
    scratch = root / f".writing-step-{step:06d}-{ranks.gather(os.getpid())[0]}"

    def together(name: str, work: Callable[[], T]) -> T:
        """The result of `work`; if it fails on one rank, every rank raises that rank's error."""
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:  # of any kind, because the other ranks are waiting
            failure = error
        said = ranks.gather(None if failure is None else (f"{name}{_reason(failure)}", is_full(failure)))
        for rank, found in enumerate(said):
            if found is not None:
                reason, full = found
                if main:
                    shutil.rmtree(scratch, ignore_errors=True)
                who = f" by rank {rank}" if ranks.count > 1 else ""
                kind = DiskFullError if full else RunFolderError
                raise kind(
                    f"checkpoint {final} cannot be written{who}: {reason}; free space or allow writing there, and "
                    f"{then}."
                ) from failure
        return result

    together("", lambda: _clear(root, scratch) if main else None)
    written: list[Path] = []
    for part in parts:
        written += together(f"{part.name}: ", partial(_written, part, scratch))
    entries: dict[str, Any] = {}
    for found in ranks.gather(together("", lambda: _entries(scratch, written))):
        entries |= found
    together("", lambda: _name(scratch, final, step, entries, keep) if main else None)
    return final


def _written(part: Part, scratch: Path) -> list[Path]:
    return list(part.write(scratch))


def _reason(error: Exception) -> str:
    """What went wrong, as a clause."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    said = one_line(error)
    return said if isinstance(error, OSError | SafetensorError) else f"{type(error).__name__}: {said}"


def _clear(root: Path, scratch: Path) -> None:
    """Remove what an interrupted save left, and create `scratch`."""
    root.mkdir(parents=True, exist_ok=True)
    _put_back(root)
    for leftover in root.glob(".writing-*"):
        shutil.rmtree(leftover)
    scratch.mkdir()


def _name(scratch: Path, final: Path, step: int, entries: dict[str, Any], keep: int) -> None:
    """Seal what was written, rename it, and remove all but the newest `keep` checkpoints."""
    root = final.parent
    _seal(scratch, step, entries)
    aside = root / f"{_ASIDE}{final.name}"
    if final.exists():
        # The step was saved before (by a run that stopped within it and continued); the newer checkpoint replaces it.
        final.rename(aside)
    scratch.rename(final)
    flush(root)
    shutil.rmtree(aside, ignore_errors=True)
    # Checkpoints of later steps are damaged, or the run would have resumed from them; they must not displace this one.
    past = list_checkpoints(root)
    for old in past[: past.index(final) + 1][:-keep]:
        shutil.rmtree(old)


def _put_back(root: Path) -> None:
    """Restore a checkpoint that was moved aside for a newer one of its step, if a kill came before the newer one."""
    for aside in root.glob(f"{_ASIDE}step-*"):
        final = root / aside.name.removeprefix(_ASIDE)
        if not final.exists():
            aside.rename(final)


def _entries(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Share and flush to disk the files that this rank wrote below `folder`, and return the SHA-256 and size of each.

    A rank reads only its own files, because on a network file system it may not see those of others yet.
    """
    share(files)
    for path in files:
        flush(path)
    return {str(p.relative_to(folder)): {"sha256": _sha256(p), "bytes": p.stat().st_size} for p in files}


def _seal(folder: Path, step: int, entries: dict[str, Any]) -> None:
    """Write the manifest, and flush it and all folders to disk."""
    manifest = folder / MANIFEST
    sealed = {"step": step, "format": FORMAT, "files": dict(sorted(entries.items()))}
    manifest.write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    for path in [manifest, *sorted(p for p in folder.rglob("*") if p.is_dir()), folder]:
        flush(path)


def list_checkpoints(root: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first; contents are not verified."""
    found = [path.parent for path in root.glob(f"step-*/{MANIFEST}")]
    return sorted(found, key=lambda folder: (len(folder.name), folder.name))


def latest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint whose files all match its manifest; None if there are no checkpoints.

    Raises:
        CheckpointError: if all checkpoints are damaged, or the newest intact manifest has another format.
    """
    with contextlib.suppress(OSError):  # a read-only folder can still be read as it is
        _put_back(root)
    problems = []
    for folder in reversed(list_checkpoints(root)):
        problem = find_damage(folder)
        if problem is None:
            return folder
        log.warning("checkpoint %s is damaged (%s); trying the one before", folder, problem)
        problems.append(f"{folder.name}: {problem}")
    if problems:
        raise CheckpointError(
            f"all checkpoints in {root} are damaged ({'; '.join(problems)}); restore one from a backup, or begin a "
            "new run."
        )
    return None


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file matches the manifest.

    Raises:
        CheckpointError: if it has another format than this version of opd writes.
    """
    try:
        sealed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found, entries = sealed.get("format"), sealed["files"]
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {found}, but this version of opd reads format {FORMAT}; resume with the "
            "version that wrote it, or begin a new run."
        )
    for name, (size, digest) in wanted.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        try:
            found = _sha256(path)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != digest:
            return f"the SHA-256 of {name} differs from the manifest"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
