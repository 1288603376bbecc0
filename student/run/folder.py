"""The run folder: resolved recipe, provenance, metrics, checkpoints, summary."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from opd.config.text import read_yaml, write_yaml
from opd.errors import CancelledError, CheckpointError, DiskFullError, OutageError, RunFolderError
from opd.files import write_whole
from student.recipe import Recipe
from student.run.resume import check_resumable, check_steps
from student.run.space import Space, is_full

PROVENANCE = "provenance.json"
RESUMABLE = (CancelledError, OutageError)
"""Errors after which a run goes on with --resume, even from before its first step."""
_PACKAGES = ("opd", "torch", "transformers", "accelerate", "grpcio", "protobuf", "numpy", "safetensors")


class RunFolder:
    """Paths and files of one run.

    Args:
        path: the folder.

    Attributes:
        space: waits where the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.space = Space()
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples.jsonl"
        self._metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, recipe: Recipe) -> "RunFolder":
        """Make the folder of a new run and write its resolved recipe.

        Raises:
            RunFolderError: when the folder exists and is not empty, or cannot be made.
        """
        path = recipe.run
        cls.refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            for draft in path.iterdir():
                draft.unlink()
        except OSError as error:
            raise RunFolderError(f"run folder {path} cannot be made: {error.strerror}; choose another.") from error
        folder = cls(path)
        _write_atomically(path / "recipe.yaml", _yaml(recipe))
        return folder

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Refuse a folder that holds anything for a new run.

        Raises:
            RunFolderError: when it exists and is not an empty folder.
        """
        # A run that was killed while it wrote its recipe left a draft of it: nothing to keep, nothing to resume.
        if path.exists() and (not path.is_dir() or not all(map(_is_draft, path.iterdir()))):
            raise RunFolderError(
                f"run folder {path} exists already; resume it with --resume or give the run another folder (run=...)."
            )

    @classmethod
    def check_new(cls, path: Path) -> None:
        """See that the folder of a new run can be made.

        Raises:
            RunFolderError: when it holds something, or cannot be written.
        """
        cls.refuse_existing(path)
        place = path
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            # Tried, because permissions are not enough: a file system may be read-only or full.
            with tempfile.TemporaryDirectory(prefix=".opd-", dir=place):
                pass
        except OSError as error:
            raise RunFolderError(
                f"run folder {path} cannot be made, because {place} cannot be written: {error.strerror}; choose "
                "another (run=...)."
            ) from error

    @contextlib.contextmanager
    def alone(self) -> Iterator["RunFolder"]:
        """This folder, which no other process can begin to write within the block.

        The lock ends with its process, however that ends. The first rank holds it for all.

        Raises:
            RunFolderError: when another process writes the run.
        """
        if os.environ.get("RANK", "0") != "0":
            yield self
            return
        path = self.path / ".lock"
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from error
        with file:
            # A file system without locks must not stop a run.
            with contextlib.suppress(OSError):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    owner = (file.read(200) or b"not known which").decode(errors="replace")
                    raise RunFolderError(
                        f"another process writes the run in {self.path} ({owner}); wait for its end or stop it, then "
                        "--resume."
                    ) from None
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield self

    def discard_unused(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """Exit callback: remove the folder when an error stops a new run before its first step.

        It stays after a signal or an outage, from which --resume continues, and where it holds metrics or a checkpoint.
        """
        if kind is not None and not issubclass(kind, RESUMABLE) and not self.used:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def used(self) -> bool:
        """Whether a step or a checkpoint is written."""
        return self._metrics.exists() or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    @classmethod
    def reopen(cls, recipe: Recipe) -> "RunFolder":
        """Open the folder of a run that is resumed.

        Raises:
            CheckpointError: when there is no such run, or its checkpoints do not fit the recipe.
        """
        if not (recipe.run / "recipe.yaml").is_file():
            raise CheckpointError(f"there is no run in {recipe.run} to resume; start it without --resume.")
        folder = cls(recipe.run)
        if any(folder.checkpoints.glob("step-*")):
            saved = read_yaml((recipe.run / "recipe.yaml").read_text(encoding="utf-8"))
            check_resumable(saved, recipe.model_dump(mode="json"))
        return folder

    def newest(self, recipe: Recipe) -> Path | None:
        """The newest intact checkpoint, which a resumed run goes on from; None when there are no checkpoints.

        Raises:
            CheckpointError: when every one is damaged.
            ConfigError: when `train.steps` of the recipe lies before it.
        """
        from student.run.checkpoint import latest_checkpoint  # it brings torch, and a folder is also only looked at

        checkpoint = latest_checkpoint(self.checkpoints)
        check_steps(checkpoint, recipe.train.steps)
        return checkpoint

    def keep_recipe(self, recipe: Recipe, updates: int) -> None:
        """Write the recipe of a resumed run; another one before it, of the first `updates` steps, is kept too."""
        path, text = self.path / "recipe.yaml", _yaml(recipe)
        before = path.read_text(encoding="utf-8")
        if before == text:
            return
        until = self.path / f"recipe-until-{updates:06d}.yaml"
        if updates and not until.exists():  # else `before` has done none of them: its run ended before it saved
            _write_atomically(until, before)
        _write_atomically(path, text)

    def write_provenance(self, fleet: Mapping[str, Any]) -> None:
        """Save versions, git revision, command line and fleet fingerprints."""
        provenance = {
            "command": sys.argv,
            "python": sys.version.split()[0],
            "packages": {name: _version(name) for name in _PACKAGES},
            "git_revision": _git_revision(),
            "fleet": dict(fleet),
        }
        self.write_json(PROVENANCE, provenance)

    def write_json(self, name: str, data: Any) -> None:
        """Write a JSON file atomically."""
        text = json.dumps(data, indent=1, default=str) + "\n"
        self.space.until_written(lambda: _write_atomically(self.path / name, text))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        self.space.until_written(lambda: _append(self._metrics, [record]))

    def last_step(self) -> int:
        """The step of the last line of metrics.jsonl, which is whole once it is `cut`; 0 without any."""
        lines = self._metrics.read_bytes().splitlines() if self._metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def append_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to samples.jsonl."""
        if records:
            self.space.until_written(lambda: _append(self.samples, records))

    def cut(self, updates: int, *, unfinished: bool = False) -> None:
        """Drop the lines that a resumed run writes again: those of later steps, and those of a final evaluation.

        Args:
            updates: steps that the resumed weights have seen.
            unfinished: the metrics and the evaluation of the last of these steps are still to come.
        """

        def stays(record: Mapping[str, Any]) -> bool:
            label = record.get("label")
            # Training answers of an unfinished step were written before its update, and are not written again.
            return label != "after" and int(record["step"]) <= updates - (unfinished and label != "train")

        for path in (self._metrics, self.samples):
            if path.exists():
                lines = path.read_text(encoding="utf-8").split("\n")
                _write_atomically(path, "".join(line + "\n" for line in lines if _holds(line, stays)))


def _yaml(recipe: Recipe) -> str:
    return write_yaml(recipe.model_dump(mode="json"))


def _holds(line: str, stays: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Whether a line is a whole record that stays; a kill can cut the last line short."""
    try:
        return stays(json.loads(line))
    except (ValueError, KeyError):
        return False


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    try:
        before = path.stat().st_size if path.exists() else 0
        try:
            # Half of a surrogate pair, which a verifier may give as its reason, becomes JSON's escape of it.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, before)  # half a line would stand before the one that is written later
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def _write_atomically(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_draft(path: Path) -> bool:
    """Whether `path` is a recipe.yaml that was never renamed."""
    return path.name.startswith(".recipe.yaml.") and path.is_file()


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    kind = DiskFullError if is_full(error) else RunFolderError
    return kind(f"{path} cannot be written: {error.strerror}; free space there or choose another run folder.")


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_revision() -> str | None:
    """Revision of the checkout the code runs from, with "+changes" when it has any; None outside a checkout.

    Asked once: a process goes on with the code that it has imported, whatever becomes of the checkout.
    """
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
