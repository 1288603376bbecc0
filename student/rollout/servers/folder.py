"""The student's weights on disk, from which servers load them; written once for all ranks and named by their hash.

    FOLDER/<first 16 digits of the SHA-256 of all tensors>/model.safetensors, or a PEFT adapter; for a sharded student
                     model-00001.safetensors ..., each written by one rank, and Hugging Face's index
    FOLDER/*.lock    held while a rank writes or has a server load, so that the other ranks then find it done

Ranks hold the same weights bit for bit and so compute the same name. If one does not, the check by the known row fails
on it. A folder appears under its name complete or not at all. If the disk is full the run waits for space, as it does
for its own folder.
"""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from opd.errors import DiskFullError, RolloutEngineError
from opd.files import share
from student.model.ranks import Ranks
from student.run.space import Space, is_full

_KEPT = 2
"""The current weights, and the previous ones, to which a server returns if it cannot load the current ones."""
_FORM = {"format": "pt"}
_LOCK = re.compile(r"[0-9a-f]{16}\.lock")


class WeightsFolder:
    """The folder of weights; see the module docstring.

    Args:
        root: path of the folder, which must be the same for the servers.
        name: identifies the run among runs that share the folder.
        space: waits for space if the disk is full; None not to wait.
    """

    def __init__(self, root: Path, name: str = "run", space: Space | None = None) -> None:
        self.root, self._name = root.absolute(), name
        self._space = space or Space()
        self._written: list[str] = []
        self._held: Counter[str] = Counter()

    def lock(self, name: str) -> FileLock:
        """The lock called `name`, shared by all ranks."""
        self.root.mkdir(parents=True, exist_ok=True)
        return FileLock(self.root / f"{_digits(name)}.lock")

    def put(self, tensors: Mapping[str, Tensor], config: str, files: tuple[str, str]) -> tuple[str, Path]:
        """Write the weights unless they are there already, and remove older ones except the last.

        Args:
            tensors: contiguous tensors on the host.
            config: contents of the JSON file that goes with them.
            files: names of the tensor file and of the JSON file.

        Returns:
            The label of the weights, and their folder.

        Raises:
            RolloutEngineError: if they cannot be written.
        """
        label = label_of(digests_of(tensors))
        folder, part = self.root / label, self.root / f"{label}.part"

        def write() -> None:
            with _said(part), self.lock(label):
                if not folder.exists():
                    # A folder found here was left by a rank that was killed; under the lock no other rank writes it.
                    _emptied(part)
                    save_file(dict(tensors), part / files[0], metadata=_FORM)
                    (part / files[1]).write_text(config)
                    share(part.iterdir())
                    os.replace(part, folder)

        # Wait for space outside the lock, because the other ranks wait for the lock without limit.
        with _given_up(part):
            self._space.until_written(write)
        self._forget_but(label)
        return label, folder

    def put_together(
        self, files: Iterable[tuple[str, dict[str, Tensor]]], config: str, ranks: Ranks
    ) -> tuple[str, Path]:
        """As `put`, for weights whose files are written by several ranks; every rank must call it.

        Args:
            files: names and tensors of this rank's files; every rank yields equally often, without tensors for no file.
            config: contents of the model's config.json.
            ranks: all ranks.

        Raises:
            OpdError: on every rank, if one of them cannot write.
        """
        # A folder found here was left by this run when it was killed, because no other run has its name.
        main, part = ranks.index == 0, self.root / f"{_digits(self._name)}.part"
        with _given_up(part):
            label = self._put_together(files, config, ranks, part)
        self._forget_but(label, remove=main)
        return label, self.root / label

    def _put_together(
        self, files: Iterable[tuple[str, dict[str, Tensor]]], config: str, ranks: Ranks, part: Path
    ) -> str:
        main = ranks.index == 0

        def agreed(work: Callable[[], object]) -> None:
            # A write may be repeated alone: the tensors of the file have been gathered and are in memory.
            self._space.until_written(lambda: _agreed(ranks, part, work), ranks.any)

        agreed(partial(_emptied, part) if main else _nothing)
        mine: dict[str, tuple[str, str]] = {}
        for file, tensors in files:
            mine |= {name: (file, digest) for name, digest in digests_of(tensors).items()}
            agreed(partial(save_file, tensors, part / file, metadata=_FORM) if tensors else _nothing)
        every = {name: found for of_rank in ranks.gather(mine) for name, found in of_rank.items()}
        label = label_of({name: digest for name, (_, digest) in every.items()})
        index = {"metadata": {}, "weight_map": {name: file for name, (file, _) in sorted(every.items())}}

        def finish() -> None:
            (part / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
            (part / "config.json").write_text(config)
            share(part.iterdir())
            with self.lock(label):
                if not (self.root / label).exists():
                    os.replace(part, self.root / label)
            shutil.rmtree(part, ignore_errors=True)

        agreed(finish if main else _nothing)
        return label

    def hold(self, label: str, *, times: int = 1) -> None:
        """Keep weights on disk until they have been released (`times` of -1) as often as they were held."""
        self._held[label] += times

    def close(self) -> None:
        """Remove the weights that were written, and the folder itself if it is then empty."""
        for name in self._written:
            shutil.rmtree(self.root / name, ignore_errors=True)
        self._written = []
        # Not the whole tree: the user named the folder and may keep other things in it. Another rank may be faster.
        with suppress(OSError):
            left = list(self.root.iterdir())
            if not any(path.is_dir() for path in left):
                for lock in left:
                    if _LOCK.fullmatch(lock.name):
                        lock.unlink(missing_ok=True)
                self.root.rmdir()

    def _forget_but(self, label: str, *, remove: bool = True) -> None:
        """Record the weights that exist now, and remove those that no server can need any more."""
        self._written = [*(name for name in self._written if name != label), label]
        old = [name for name in self._written[:-_KEPT] if not self._held[name]]
        for name in old if remove else ():
            shutil.rmtree(self.root / name, ignore_errors=True)
        self._written = [name for name in self._written if name not in old]


def _agreed(ranks: Ranks, part: Path, work: Callable[[], object]) -> None:
    """Do this rank's work; if it fails on one rank it fails on all, and a full disk is reported on all."""

    def said() -> DiskFullError | None:
        try:
            with _said(part):
                work()
        except DiskFullError as error:
            return error
        return None

    full = ranks.agree(said)
    if ranks.any(full is not None):
        raise full or DiskFullError(f"the disk of {part.parent} is full on another rank; free space there.")


def _nothing() -> None:
    """Do nothing: the work of a rank that has no file to write."""


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@contextmanager
def _said(part: Path) -> Iterator[None]:
    """Turn errors of the disk into errors of the engine; a full disk gets its own class, which can be waited for."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kind = DiskFullError if is_full(error) else RolloutEngineError
        raise kind(
            f"the weights for the rollout servers cannot be written to {part.parent} ({error}); free space or allow "
            "writing there, or set rollout.engine.folder to another folder."
        ) from error


@contextmanager
def _given_up(part: Path) -> Iterator[None]:
    """Remove `part` if it cannot be written; a disk that stays full becomes an error of the engine."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, DiskFullError):
            raise RolloutEngineError(str(error)) from error
        raise


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The SHA-256 of each tensor's dtype, shape and bytes, by name."""
    found = {}
    for name, tensor in tensors.items():
        digest = hashlib.sha256(json.dumps([str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
        found[name] = digest.hexdigest()
    return found


def label_of(digests: Mapping[str, str]) -> str:
    """16 hexadecimal digits of the SHA-256 of all names and digests; independent of the split into files."""
    return _digits(json.dumps(sorted(digests.items())))


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
