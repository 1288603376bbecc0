"""A content-addressed store of scores: a cache in front of the fleet, and a record to train from without a teacher.

    store/
      teachers/<name>.json         what the teacher was (`TeacherInfo`)
      heads/<hash>.safetensors     heads of hidden payloads
      tokenizers/<fingerprint>     tokenizers of teachers whose students have another one
      scores.sqlite                rows with their scores, by `score_key` (row.py, blobs.py)

Scoring rollouts once and training on them offline follows Lightning-OPD.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from google.protobuf import json_format
from safetensors.numpy import save

from opd.errors import DataError, RunFolderError, one_line
from opd.files import write_whole
from opd.fleet.record.blobs import Blobs
from opd.fleet.record.row import StoredRow, from_bytes, load_with_meta, to_bytes
from opd.wire.fingerprint import head_hash
from opd.wire.types import Head, Scores
from opd.wire.v1 import teacher_pb2 as pb

log = logging.getLogger("opd.fleet")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class ScoreStore:
    """Scores on disk. Thread-safe; several processes may share a folder.

    Args:
        folder: the folder, which is created if it does not exist.
        max_bytes: largest size of the scores' file; the least recently used scores make room for new ones. 0 keeps all.

    Raises:
        RunFolderError: if the folder cannot be created.
        DataError: if the store is damaged or of another format.
    """

    def __init__(self, folder: Path | str, max_bytes: int = 0) -> None:
        self.folder = Path(folder)
        self._said = False
        try:
            for name in ("teachers", "heads"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            self._scores = Blobs(self.folder / "scores.sqlite", max_bytes)
        except OSError as error:
            raise RunFolderError(
                f"score store {self.folder} cannot be created: {error.strerror}; choose another folder."
            ) from error

    # Scores.

    def get(self, key: str) -> Scores | None:
        """The scores under a key; None if there are none. A damaged row counts as none and is removed.

        Raises:
            DataError: if the file as a whole is damaged.
        """
        data = self._scores.get(key)
        try:
            return None if data is None else from_bytes(key, data, self.folder).scores
        except DataError as error:
            if not self._said:
                self._said = True
                log.warning("%s; damaged rows are removed, and scored again", str(error).rpartition(";")[0])
            self._scores.remove(key)
            return None

    def read(self, key: str) -> Scores | None:
        """The scores under a key; None if there are none. Nothing on disk is changed.

        Raises:
            DataError: if the row is damaged; the message names it.
        """
        data = self._scores.get(key)
        return None if data is None else from_bytes(key, data, self.folder).scores

    def put(self, rows: Sequence[StoredRow]) -> list[str]:
        """Store rows, all or none; returns their keys. One call with many rows is much faster than many calls."""
        keys = [row.key for row in rows]
        self._scores.put([(key, to_bytes(row)) for key, row in zip(keys, rows, strict=True)])
        return keys

    def entries(self) -> Iterator[StoredRow]:
        """All rows, in the order of their keys.

        Raises:
            DataError: if a row is damaged; the message names it.
        """
        for key in self._scores:
            data = self._scores.get(key)
            if data is not None:  # otherwise another process has dropped it
                yield from_bytes(key, data, self.folder)

    def __contains__(self, key: str) -> bool:
        return key in self._scores

    def __len__(self) -> int:
        return len(self._scores)

    def close(self) -> None:
        """Close the file."""
        self._scores.close()

    # Teachers and heads.

    def put_teacher(self, info: pb.TeacherInfo) -> Path:
        """Store a teacher's description; returns its file."""
        path = self._teacher_path(info.name)
        write_whole(path, json_format.MessageToJson(info))
        return path

    def teachers(self) -> dict[str, pb.TeacherInfo]:
        """The recorded teachers by name.

        Raises:
            DataError: if a description is damaged; the message names it.
        """
        found = {}
        for path in sorted((self.folder / "teachers").glob("*.json")):
            try:
                info = json_format.Parse(path.read_text(encoding="utf-8"), pb.TeacherInfo())
            except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(f"{path} is not a teacher's description: {error}; record it again.") from error
            found[info.name] = info
        return found

    def put_head(self, head: Head) -> Path:
        """Store a head under its content hash; returns its file."""
        arrays = {"weight": np.ascontiguousarray(head.weight)}
        if head.bias is not None:
            arrays["bias"] = np.ascontiguousarray(head.bias)
        meta = {"dtype": head.dtype, "logit_scale": repr(head.logit_scale), "soft_cap": repr(head.soft_cap)}
        path = self._head_path(head.hash)
        write_whole(path, save(arrays, meta))
        return path

    def head(self, content_hash: str) -> Head | None:
        """The head with a content hash; None if it was not recorded.

        Raises:
            DataError: if the file is damaged, or its contents do not have the hash in its name.
        """
        path = self._head_path(content_hash)
        if not path.exists():
            return None
        data = path.read_bytes()
        try:
            arrays, meta = load_with_meta(data)
            scale, cap = float(meta["logit_scale"]), float(meta["soft_cap"])
            head = Head(arrays["weight"], arrays.get("bias"), meta["dtype"], scale, cap, content_hash)
            found = head_hash(head)
        except Exception as error:  # of whatever class, as for rows
            raise DataError(f"{path} is damaged: {one_line(error)}; remove it and score again.") from error
        if found != content_hash:
            raise DataError(f"head {path} does not have the hash that its name gives; remove it and record it again.")
        return head

    def put_tokenizer(self, fingerprint: str, document: bytes) -> None:
        """Store a tokenizer (`opd.wire.tokenizer`) under its fingerprint."""
        path = self._tokenizer_path(fingerprint)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, document)

    def tokenizer(self, fingerprint: str) -> bytes:
        """The tokenizer with a fingerprint, which its reader checks; empty if it was not recorded."""
        path = self._tokenizer_path(fingerprint)
        return path.read_bytes() if path.exists() else b""

    # Files.

    def _teacher_path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise DataError(f"teacher name {name!r} cannot name a file; use letters, digits, '.', '_' and '-'.")
        return self.folder / "teachers" / f"{name}.json"

    def _tokenizer_path(self, fingerprint: str) -> Path:
        if not _NAME.fullmatch(fingerprint):
            raise DataError(f"fingerprint {fingerprint!r} cannot name a file; it must be a hash in hex digits.")
        return self.folder / "tokenizers" / fingerprint

    def _head_path(self, content_hash: str) -> Path:
        if not _NAME.fullmatch(content_hash):
            raise DataError(f"head hash {content_hash!r} cannot name a file; it must be a hash in hex digits.")
        return self.folder / "heads" / f"{content_hash}.safetensors"
