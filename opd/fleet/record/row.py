"""A stored row: its key, and its serialised form.

The key is the SHA-256 of everything that the scores depend on: weights hash, token ids, prompt length, ids to gather,
payload, temperature and spans. The serialised form is the CRC32C of a safetensors file, as four little-endian bytes,
and then that file. It holds the row as well as its scores, so that a store can be iterated as a data set. A change of
the key or the serialised form raises `FORMAT` in blobs.py.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from opd.errors import DataError, one_line
from opd.wire.checksum import crc32c
from opd.wire.spans import spans_to_bytes
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores

_FIELDS = ("sampled", "values", "ids", "log_tail", "hidden", "logits")
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A stored row: what was asked for and what was returned."""

    teacher: str
    item: ScoreItem
    spec: PayloadSpec
    temperature: float
    scores: Scores

    @property
    def key(self) -> str:
        """The key under which a store keeps it."""
        return score_key(self.scores.weights_hash, self.item, self.spec, self.temperature)


def score_key(weights_hash: str, item: ScoreItem, spec: PayloadSpec, temperature: float = 1.0) -> str:
    """SHA-256, in hex, of everything that the scores of a row depend on."""
    digest = hashlib.sha256()
    what = [weights_hash, spec.kind.value, spec.k, spec.value_dtype, float(temperature), item.prompt_length]
    digest.update(json.dumps([*what, len(item.token_ids)]).encode())
    digest.update(np.ascontiguousarray(item.token_ids, "<u4").tobytes())
    if item.gather_ids is not None and spec.kind is PayloadKind.GATHER:
        digest.update(np.ascontiguousarray(item.gather_ids, "<u4").tobytes())
    if item.spans:
        digest.update(b"spans" + spans_to_bytes(item.spans))
    return digest.hexdigest()


def to_bytes(row: StoredRow) -> bytes:
    """The serialised form of a row."""
    arrays = {name: getattr(row.scores, name) for name in _FIELDS if getattr(row.scores, name) is not None}
    if row.spec.kind is PayloadKind.GATHER and row.item.gather_ids is not None:
        # For gather, `ids` equals the caller's own ids, so they are stored once.
        arrays.pop("ids", None)
        arrays["gather_ids"] = row.item.gather_ids
    arrays["token_ids"] = np.asarray(row.item.token_ids, np.uint32)
    if row.item.spans:
        arrays["spans"] = np.array(row.item.spans, np.uint32)
    arrays = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
    meta = {
        "teacher": row.teacher,
        "prompt_length": str(row.item.prompt_length),
        "kind": row.spec.kind.value,
        "k": str(row.spec.k),
        "value_dtype": row.spec.value_dtype,
        "temperature": repr(float(row.temperature)),
        "weights_hash": row.scores.weights_hash,
        "wire_bytes": str(row.scores.wire_bytes),
    }
    data = save(arrays, meta)
    return crc32c(data).to_bytes(_CHECKSUM_BYTES, "little") + data


def from_bytes(key: str, data: bytes, where: object) -> StoredRow:
    """The row that `to_bytes` serialised.

    Raises:
        DataError: if the bytes are damaged or belong to another key; the message names the key and `where` they were
            kept.
    """
    try:
        written, data = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        if crc32c(data) != int.from_bytes(written, "little"):
            raise ValueError("their checksum does not match")
        arrays, meta = load_with_meta(data)
        spec = PayloadSpec(PayloadKind(meta["kind"]), int(meta["k"]), meta["value_dtype"])
        gather = arrays.get("gather_ids")
        spans = tuple((int(start), int(end)) for start, end in arrays.get("spans", ()))
        item = ScoreItem(arrays["token_ids"], int(meta["prompt_length"]), gather, spans)
        fields: dict[str, Any] = {name: arrays.get(name) for name in _FIELDS}
        if spec.kind is PayloadKind.GATHER:
            fields["ids"] = gather
        _check_shapes(item, spec, fields)
        scores = Scores(**fields, weights_hash=meta["weights_hash"], wire_bytes=int(meta["wire_bytes"]))
        row = StoredRow(meta["teacher"], item, spec, float(meta["temperature"]), scores)
        if row.key != key:
            raise ValueError("they do not belong to their key")
    except Exception as error:  # of whatever class: what the bytes hold is not ours until all of this has passed
        raise DataError(
            f"stored scores {key} in {where} are damaged: {one_line(error)}; remove the store and score again."
        ) from error
    return row


def _check_shapes(item: ScoreItem, spec: PayloadSpec, fields: dict[str, Any]) -> None:
    """Raise ValueError unless the arrays are those that a row of this payload has.

    The checksum and the key do not cover this: a row may have been written whole by something else.
    """
    if item.token_ids.ndim != 1 or item.token_ids.dtype.kind not in "iu" or item.response_length < 1:
        raise ValueError(f"token_ids are {item.token_ids.dtype} of shape {item.token_ids.shape}")
    rows, k = item.scored_length, spec.k
    wanted: dict[str, tuple[int, ...]] = {
        "sampled": (rows,),
        "values": (rows, k),
        "ids": (rows, k),
        "log_tail": (rows,),
    }
    if spec.kind is PayloadKind.SAMPLED:
        wanted = {"sampled": (rows,)}
    elif spec.kind in (PayloadKind.HIDDEN, PayloadKind.FULL):
        wanted = {"hidden" if spec.kind is PayloadKind.HIDDEN else "logits": (rows, -1)}
    for name, array in fields.items():
        found = None if array is None else (*array.shape[:1], *(-1 if k == 0 else n for n in array.shape[1:]))
        if found != wanted.get(name):
            raise ValueError(f"{name} has shape {found}, but payload {spec.kind} needs {wanted.get(name)}")
        kinds = "iu" if name == "ids" else "fu" if name == "hidden" else "f"
        if array is not None and array.dtype.kind not in kinds:
            raise ValueError(f"{name} has dtype {array.dtype}")


def load_with_meta(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    arrays = load(data)
    # `load` drops the metadata, which is in the header: eight bytes with its length, then JSON.
    length = int.from_bytes(data[:8], "little")
    return arrays, json.loads(data[8 : 8 + length]).get("__metadata__", {})
