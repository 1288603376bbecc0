"""A content-addressed store of scores: a cache in front of the fleet, and a record to train from without a teacher.

    store/
      teachers/<name>.json         what the teacher was (`TeacherInfo`)
      heads/<hash>.safetensors     heads of hidden payloads
      scores/<ab>/<key>.safetensors

The key is the SHA-256 of everything the numbers depend on: weights hash, token ids, prompt length, ids to gather,
payload and temperature. An entry holds the row as well as its scores, so a store can be iterated as a data set
(scoring rollouts once and training on them offline follows Lightning-OPD). Files appear by an atomic rename, so several
processes may share a store and a killed one leaves no half-written entry. Nothing is fsynced: an entry that a power cut
damaged fails its CRC32C, and a cache scores the row again.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from opd.errors import DataError, InvalidRequestError
from opd.wire.checksum import crc32c
from opd.wire.fingerprint import head_hash
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")
_FIELDS = ("sampled", "values", "ids", "log_tail", "hidden", "logits")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TRIM_TO = 0.9


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One stored row: what was asked and what came back."""

    key: str
    teacher: str
    item: ScoreItem
    spec: PayloadSpec
    temperature: float
    scores: Scores


def score_key(weights_hash: str, item: ScoreItem, spec: PayloadSpec, temperature: float = 1.0) -> str:
    """SHA-256, in hex, of everything the scores of a row depend on."""
    digest = hashlib.sha256()
    what = [weights_hash, spec.kind.value, spec.k, spec.value_dtype, float(temperature), item.prompt_length]
    digest.update(json.dumps([*what, len(item.token_ids)]).encode())
    digest.update(np.ascontiguousarray(item.token_ids, "<u4").tobytes())
    if item.gather_ids is not None and spec.kind is PayloadKind.GATHER:
        digest.update(np.ascontiguousarray(item.gather_ids, "<u4").tobytes())
    return digest.hexdigest()


class ScoreStore:
    """Scores on disk. Thread-safe; several processes may share a folder.

    Args:
        folder: made when it is not there.
        max_bytes: drop the entries that were used least recently beyond this; 0 keeps all.
    """

    def __init__(self, folder: Path | str, max_bytes: int = 0) -> None:
        self.folder = Path(folder)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes: int | None = None
        self._trimmed = False
        try:
            for name in ("teachers", "heads", "scores"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"score store {self.folder} cannot be made: {error.strerror}; choose another.") from error

    # Scores.

    def get(self, key: str) -> Scores | None:
        """The scores under a key; None when there are none. A damaged entry is removed and counts as none."""
        path = self._path(key)
        try:
            found = self.read(key)
            if self._max_bytes and found is not None:
                os.utime(path)
        except FileNotFoundError:
            return None
        except DataError:
            path.unlink(missing_ok=True)
            return None
        return found

    def read(self, key: str) -> Scores | None:
        """The scores under a key; None when there are none. Nothing on the disk is touched.

        Raises:
            DataError: the entry is damaged; names it.
        """
        try:
            return _read(key, self._path(key)).scores
        except FileNotFoundError:
            return None

    def put(self, teacher: str, item: ScoreItem, spec: PayloadSpec, temperature: float, scores: Scores) -> str:
        """Keep the scores of a row; returns the key."""
        key = score_key(scores.weights_hash, item, spec, temperature)
        path = self._path(key)
        if path.exists():  # the name is the hash of the content's inputs: another writer was quicker
            return key
        arrays = {name: getattr(scores, name) for name in _FIELDS if getattr(scores, name) is not None}
        if spec.kind is PayloadKind.GATHER and item.gather_ids is not None:
            # The caller's own ids come back as `ids`; they are kept once.
            arrays.pop("ids", None)
            arrays["gather_ids"] = item.gather_ids
        arrays["token_ids"] = np.asarray(item.token_ids, np.uint32)
        arrays = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
        meta = {
            "teacher": teacher,
            "prompt_length": str(item.prompt_length),
            "kind": spec.kind.value,
            "k": str(spec.k),
            "value_dtype": spec.value_dtype,
            "temperature": repr(float(temperature)),
            "weights_hash": scores.weights_hash,
            "wire_bytes": str(scores.wire_bytes),
            "crc32c": str(_checksum(arrays)),
        }
        data = save(arrays, meta)
        path.parent.mkdir(exist_ok=True)
        _write(path, data)
        self._account(len(data))
        return key

    def entries(self) -> Iterator[StoredRow]:
        """All entries in the order of their keys.

        Raises:
            DataError: an entry is damaged; names it.
        """
        for path in sorted((self.folder / "scores").glob("??/*.safetensors")):
            yield _read(path.stem, path)

    def __contains__(self, key: str) -> bool:
        return self._path(key).is_file()

    def __len__(self) -> int:
        return sum(1 for _ in (self.folder / "scores").glob("??/*.safetensors"))

    # Teachers and heads.

    def put_teacher(self, info: pb.TeacherInfo) -> None:
        """Keep what a teacher is."""
        _write(self._teacher_path(info.name), json_format.MessageToJson(info).encode())

    def teachers(self) -> dict[str, pb.TeacherInfo]:
        """The recorded teachers by name.

        Raises:
            DataError: a description is damaged; names it.
        """
        found = {}
        for path in sorted((self.folder / "teachers").glob("*.json")):
            try:
                info = json_format.Parse(path.read_text(encoding="utf-8"), pb.TeacherInfo())
            except (json_format.ParseError, UnicodeDecodeError) as error:
                raise DataError(f"{path} is not a teacher's description: {error}; record it again.") from error
            found[info.name] = info
        return found

    def put_head(self, head: Head) -> None:
        """Keep a head under its content hash."""
        arrays = {"weight": np.ascontiguousarray(head.weight)}
        if head.bias is not None:
            arrays["bias"] = np.ascontiguousarray(head.bias)
        meta = {"dtype": head.dtype, "logit_scale": repr(head.logit_scale), "soft_cap": repr(head.soft_cap)}
        _write(self._head_path(head.hash), save(arrays, meta))

    def head(self, content_hash: str) -> Head | None:
        """The head with a content hash; None when it was not recorded.

        Raises:
            DataError: the file does not have the hash of its name.
        """
        path = self._head_path(content_hash)
        if not path.exists():
            return None
        arrays, meta = _load(path)
        scale, cap = float(meta["logit_scale"]), float(meta["soft_cap"])
        head = Head(arrays["weight"], arrays.get("bias"), meta["dtype"], scale, cap, content_hash)
        if head_hash(head) != content_hash:
            raise DataError(f"head {path} does not have the hash of its name; record it again.")
        return head

    # Files.

    def _path(self, key: str) -> Path:
        return self.folder / "scores" / key[:2] / f"{key}.safetensors"

    def _teacher_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise DataError(f"teacher name {name!r} cannot name a file; use letters, digits, '.', '_' and '-'.")
        return self.folder / "teachers" / f"{name}.json"

    def _head_path(self, content_hash: str) -> Path:
        if not _NAME.fullmatch(content_hash):
            raise DataError(f"head hash {content_hash!r} is not one.")
        return self.folder / "heads" / f"{content_hash}.safetensors"

    def _account(self, size: int) -> None:
        if not self._max_bytes:
            return
        with self._lock:
            if self._bytes is None:
                self._bytes = sum(stat.st_size for _, stat in self._files())
            else:
                self._bytes += size
            if self._bytes > self._max_bytes:
                self._trim()

    def _trim(self) -> None:
        """Remove the least recently used entries until a tenth of the bound is free.

        Files are listed anew, since other processes write and remove entries too; with a tenth free, that is rare.
        """
        if not self._trimmed:
            self._trimmed = True
            log.warning(
                "the score store %s has reached %d bytes; from now on the scores used least recently are dropped "
                "(teachers.fleet.cache.max_bytes)",
                self.folder,
                self._max_bytes,
            )
        files = sorted(self._files(), key=lambda entry: entry[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if total <= _TRIM_TO * self._max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= stat.st_size
        self._bytes = total

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self.folder / "scores").glob("??/*.safetensors"):
            try:
                yield path, path.stat()
            except FileNotFoundError:
                continue


def _checksum(arrays: dict[str, NDArray[Any]]) -> int:
    value = 0
    for name in sorted(arrays):
        value = crc32c(arrays[name].tobytes(), value)
    return value


def _load(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    data = path.read_bytes()
    try:
        arrays = load(data)
        # `load` drops the metadata, which stand in the header: 8 bytes of its length, then JSON.
        length = int.from_bytes(data[:8], "little")
        return arrays, json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}; remove it and score again.") from error


def _read(key: str, path: Path) -> StoredRow:
    arrays, meta = _load(path)
    try:
        if _checksum(arrays) != int(meta["crc32c"]):
            raise ValueError("its checksum does not match")
        spec = PayloadSpec(PayloadKind(meta["kind"]), int(meta["k"]), meta["value_dtype"])
        gather = arrays.get("gather_ids")
        item = ScoreItem(arrays["token_ids"], int(meta["prompt_length"]), gather)
        fields: dict[str, Any] = {name: arrays.get(name) for name in _FIELDS}
        if spec.kind is PayloadKind.GATHER:
            fields["ids"] = gather
        scores = Scores(**fields, weights_hash=meta["weights_hash"], wire_bytes=int(meta["wire_bytes"]))
        temperature = float(meta["temperature"])
        if score_key(scores.weights_hash, item, spec, temperature) != key:
            raise ValueError("it does not belong to its name")
        return StoredRow(key, meta["teacher"], item, spec, temperature, scores)
    except (KeyError, ValueError, InvalidRequestError) as error:
        raise DataError(f"stored scores {path} are damaged: {error}; remove the file and score again.") from error


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
