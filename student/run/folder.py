"""The run folder: resolved recipe, provenance, metrics, checkpoints, summary."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from opd.config.text import write_yaml
from opd.errors import CancelledError, CheckpointError, DiskFullError, OutageError, RunFolderError
from opd.files import check_writable, flush, lock, write_whole
from student.run.progress import now
from student.run.reading import read_recipe, read_steps
from student.run.resume import check_resumable, check_steps
from student.run.space import Space, is_full
from student.settings.recipe import Recipe

PROVENANCE = "provenance.json"
RESUMABLE = (CancelledError, OutageError)
"""Errors after which a run can be resumed with --resume, even before its first step."""
_PACKAGES = ("opd", "torch", "transformers", "accelerate", "grpcio", "protobuf", "numpy", "safetensors")


class RunFolder:
    """The paths and files of one run.

    Args:
        path: the folder.

    Attributes:
        space: waits for space if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.space = Space()
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples.jsonl"
        self._metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, recipe: Recipe) -> "RunFolder":
        """Create the folder of a new run and write its resolved recipe.

        Of several processes that create one folder, the first to name its recipe has it.

        Raises:
            RunFolderError: if the folder exists and is not empty, or cannot be created.
        """
        path = recipe.run
        cls.refuse_existing(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"run folder {path} cannot be created: {error.strerror}; choose another.") from error
        try:
            write_whole(path / "recipe.yaml", _yaml(recipe), new=True)
        except FileExistsError:
            raise _exists(path) from None
        except OSError as error:
            raise _unwritable(path / "recipe.yaml", error) from error
        for draft in filter(_is_draft, path.iterdir()):
            draft.unlink(missing_ok=True)
        return cls(path)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        """Refuse a folder for a new run that holds anything.

        Raises:
            RunFolderError: if it exists and is not an empty folder.
        """
        if path.exists() and not path.is_dir():
            raise RunFolderError(f"run folder {path} is a file; choose another folder (run=...).")
        # A run that was killed while writing its recipe leaves only a draft, which is not worth keeping.
        if path.exists() and not all(map(_is_draft, path.iterdir())):
            raise _exists(path)

    @classmethod
    def check_new(cls, path: Path) -> None:
        """Check that the folder of a new run can be created.

        Raises:
            RunFolderError: if it holds something, or cannot be written.
        """
        cls.refuse_existing(path)
        check_writable(path, f"run folder {path}", "choose another (run=...)")

    @contextlib.contextmanager
    def alone(self) -> Iterator["RunFolder"]:
        """Lock the folder within the block, so that no other process can start writing to it.

        The lock ends with its process in any case. Rank 0 holds it for all ranks.

        Raises:
            RunFolderError: if another process is writing the run.
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
            if not lock(path, file.fileno()):
                file.seek(0)
                owner = (file.read(200) or b"not known which").decode(errors="replace")
                raise RunFolderError(
                    f"another process writes the run in {self.path} ({owner}); stop it or wait until it ends, "
                    "then use --resume."
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield self

    def discard_unused(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        """Exit callback: remove the folder if an error stops a new run before its first step.

        The folder stays after a signal or an outage, which --resume continues, and if it has metrics or a checkpoint.
        """
        if kind is not None and not issubclass(kind, RESUMABLE) and not self.used:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def used(self) -> bool:
        """Whether a step or a checkpoint has been written."""
        trained = any(record["step"] for record in read_steps(self.path, []))
        return trained or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    @classmethod
    def reopen(cls, recipe: Recipe) -> "RunFolder":
        """Open the folder of a run that is resumed.

        Raises:
            CheckpointError: if there is no such run.
        """
        if not (recipe.run / "recipe.yaml").is_file():
            raise CheckpointError(f"there is no run to resume in {recipe.run}; start it without --resume.")
        return cls(recipe.run)

    def newest(self, recipe: Recipe) -> Path | None:
        """The newest intact checkpoint, from which a resumed run continues; None if there are no checkpoints.

        A run first locks its folder (`alone`): the recipe and the checkpoints there may be another run's until then.

        Raises:
            CheckpointError: if the checkpoints do not fit the recipe, or all are damaged.
            ConfigError: if the checkpoint is beyond the recipe's `train.steps`.
        """
        from student.run.checkpoint import latest_checkpoint  # imports torch, which readers of a folder do not need

        if any(self.checkpoints.glob("step-*")):
            problems: list[str] = []
            saved = read_recipe(self.path, problems)
            if problems:
                raise CheckpointError(f"{self.path}: {problems[0].rstrip('.')}; restore it, or begin a new run.")
            check_resumable(saved, recipe.model_dump(mode="json"))
        checkpoint = latest_checkpoint(self.checkpoints)
        check_steps(checkpoint, recipe.train.steps)
        return checkpoint

    def keep_recipe(self, recipe: Recipe, updates: int) -> None:
        """Write the recipe of a resumed run; a different earlier one, of the first `updates` steps, is kept too."""
        path, text = self.path / "recipe.yaml", _yaml(recipe)
        before = path.read_text(encoding="utf-8")
        if before == text:
            return
        until = self.path / f"recipe-until-{updates:06d}.yaml"
        if updates and not until.exists():  # else `before` has done none of them: its run ended before it saved
            _write_atomically(until, before)
        _write_atomically(path, text)

    def write_provenance(self, fleet: Mapping[str, Any], device: str) -> None:
        """Save when and where the run began, versions, git revision, command line and fleet fingerprints."""
        provenance = {
            "started": now(),
            "host": socket.gethostname(),
            "device": device,
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
        """The step of the last line of metrics.jsonl, which is complete after `cut`; 0 if there is none."""
        lines = self._metrics.read_bytes().splitlines() if self._metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def append_samples(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to samples.jsonl."""
        if records:
            self.space.until_written(lambda: _append(self.samples, records))

    def flush(self) -> None:
        """Flush metrics and samples to disk, so that a power cut leaves no checkpoint without its steps' lines."""
        for path in (self._metrics, self.samples):
            with contextlib.suppress(OSError):  # not there yet; a disk that takes nothing fails the checkpoint too
                flush(path)

    def cut(self, updates: int, *, unfinished: bool = False) -> None:
        """Drop the lines that a resumed run will write again: those of later steps and of a final evaluation.

        Args:
            updates: number of steps that the resumed weights have been trained for.
            unfinished: whether the metrics and the evaluation of the last of these steps are still to come.
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
    """Whether a line is a complete record that stays; a kill can cut the last line short."""
    try:
        return stays(json.loads(line))
    except (ValueError, KeyError):
        return False


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    try:
        before = path.stat().st_size if path.exists() else 0
        try:
            # An unpaired surrogate, which a verifier's reason may contain, is written as its JSON escape.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, before)  # so that no partial line remains before the next one
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def _write_atomically(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_draft(path: Path) -> bool:
    """Whether `path` is a recipe.yaml that never had its name."""
    return path.name.startswith(".recipe.yaml.")


def _exists(path: Path) -> RunFolderError:
    return RunFolderError(
        f"run folder {path} exists already; resume it with --resume, or choose another folder (run=...)."
    )


def _unwritable(path: Path, error: OSError) -> RunFolderError:
    kind = DiskFullError if is_full(error) else RunFolderError
    return kind(f"{path} cannot be written: {error.strerror}; free space there, or choose another run folder.")


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_revision() -> str | None:
    """Revision of the checkout that the code runs from, with "+changes" if it has any; None outside a checkout.

    Determined once, because a process keeps running the code that it has imported.
    """
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
