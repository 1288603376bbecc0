"""Scores of some response positions only: in an episode, what the student wrote and not what the environment answered.

A request names spans of the response (`ScoreItem.spans`), and the scores have one row per position in them. Code that
needs a row for every response position fills in the others with `put_back`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import InvalidRequestError
from opd.wire.types import U32, ScoreItem, Scores

Spans = tuple[tuple[int, int], ...]
_BY_POSITION = ("sampled", "values", "ids", "log_tail", "hidden", "logits", "ranks")


def spans_of(mask: NDArray[np.bool_]) -> Spans:
    """The runs of True in a [T] mask; empty if all are True. If none is, the first position, as a request needs one."""
    if mask.all():
        return ()
    # With a False at either end, every run has a rising and a falling edge, so edges come in pairs.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2)) or ((0, 1),)


def check_spans(index: int, item: ScoreItem) -> None:
    """Raise InvalidRequestError for spans that are empty, overlap, are out of order or end beyond the response."""
    last = 0
    for start, end in item.spans:
        if not last <= start < end <= item.response_length:
            raise InvalidRequestError(
                f"sequence {index}: span ({start}, {end}) must not be empty, must begin at {last} or later, and must "
                f"end within the response of {item.response_length} tokens."
            )
        last = end


def spans_to_bytes(spans: Spans) -> bytes:
    """Spans as they travel: pairs of little-endian u32."""
    return np.array(spans, "<u4").tobytes()


def spans_from_bytes(index: int, data: bytes) -> Spans:
    """The inverse of `spans_to_bytes`; the spans are not compared with a response yet.

    Raises:
        InvalidRequestError: if the bytes end within a pair.
    """
    if len(data) % 8:
        raise InvalidRequestError(f"sequence {index}: spans has {len(data)} bytes, but spans take 8 bytes each.")
    return tuple((int(start), int(end)) for start, end in np.frombuffer(data, "<u4").reshape(-1, 2))


def whole(item: ScoreItem) -> ScoreItem:
    """The item without spans, so that all positions are scored; those not asked for gather the ids 0 to K - 1."""
    if not item.spans:
        return item
    ids = item.gather_ids
    return replace(item, gather_ids=None if ids is None else _spread(item, ids), spans=())


def cut(scores: Scores, item: ScoreItem) -> Scores:
    """The scores [N, ...] of the wanted positions, from those of all response positions [T, ...]."""
    if not item.spans:
        return scores
    found = {name: getattr(scores, name) for name in _BY_POSITION}
    fields: dict[str, Any] = {name: item.pick(array) for name, array in found.items() if array is not None}
    return replace(scores, **fields)


def put_back(parts: Sequence[tuple[Scores, ScoreItem, int]], length: int, gather_ids: U32 | None = None) -> Scores:
    """Scores of all response positions [T, ...], from those of some, which one or several requests returned.

    Positions that no request asked for get finite placeholders that belong to no model: equal log-probs for the K ids
    and the tail, zeros for hidden states and logits. Nothing may be learned from these positions.

    Args:
        parts: for each item that was scored: its scores, the item, and the position in the whole response at which the
            item's response begins.
        length: T.
        gather_ids: [T, K] the ids of all positions, for payload gather; None takes 0 to K - 1 at positions that were
            not asked for.
    """
    first = parts[0][0]
    places = [offset + item.pick(np.arange(item.response_length)) for _, item, offset in parts]
    # A single request for all positions: there is nothing to fill in, so nothing is copied.
    if len(parts) == 1 and len(places[0]) == length:
        return first
    fields: dict[str, Any] = {}
    # K ids and the tail share the mass equally, so that placeholders add up to 1 as well.
    even = -np.log(1.0 + (first.values.shape[1] if first.values is not None else 1))
    for name in _BY_POSITION:
        arrays = [getattr(scores, name) for scores, _, _ in parts]
        if arrays[0] is None:
            continue
        # A server may send some parts as f32 (`layout_of`), so the dtypes of parts may differ.
        out = np.empty((length, *arrays[0].shape[1:]), np.result_type(*arrays))
        out[...] = _first_ids(arrays[0]) if name == "ids" else 0 if name in ("hidden", "logits") else even
        for place, array in zip(places, arrays, strict=True):
            out[place] = array
        fields[name] = out
    if gather_ids is not None:
        fields["ids"] = gather_ids
    asked = sum(map(len, places))
    received = sum(scores.wire_bytes for scores, _, _ in parts)
    return replace(first, **fields, wire_bytes=received, unasked=length - asked)


def _first_ids(ids: U32) -> U32:
    return np.arange(ids.shape[1], dtype=ids.dtype)


def _spread(item: ScoreItem, rows: U32) -> U32:
    """[T, K] ids: `rows` at the wanted positions, 0 to K - 1 elsewhere."""
    out = np.empty((item.response_length, *rows.shape[1:]), rows.dtype)
    out[...] = _first_ids(rows)
    out[item.pick(np.arange(item.response_length))] = rows
    return out
