"""Scores of some response positions alone: what an episode's student wrote, and not what its environment answered.

A request names spans of the response (`ScoreItem.spans`); what comes back has a row for each position in them. Code
that needs a row for every response position puts the others back.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import InvalidRequestError
from opd.wire.types import U32, ScoreItem, Scores

Spans = tuple[tuple[int, int], ...]
_BY_POSITION = ("sampled", "values", "ids", "log_tail", "hidden", "logits")


def spans_of(mask: NDArray[np.bool_]) -> Spans:
    """The runs of True in [T]; empty where all are True. Where none is, the first position: none cannot be asked."""
    if mask.all():
        return ()
    # With a False on either side every run has a rise and a fall, in pairs.
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2)) or ((0, 1),)


def check_spans(index: int, item: ScoreItem) -> None:
    """Refuse spans that are empty, overlap, are out of order or reach beyond the response, with InvalidRequestError."""
    last = 0
    for start, end in item.spans:
        if not last <= start < end <= item.response_length:
            raise InvalidRequestError(
                f"sequence {index}: span ({start}, {end}) must not be empty, must begin at {last} or later, and must "
                f"end within the response of {item.response_length} tokens."
            )
        last = end


def spans_to_bytes(spans: Spans) -> bytes:
    """Pairs of u32 little-endian, as they travel."""
    return np.array(spans, "<u4").tobytes()


def spans_from_bytes(index: int, data: bytes) -> Spans:
    """What `spans_to_bytes` wrote, not yet compared with a response.

    Raises:
        InvalidRequestError: for half a pair.
    """
    if len(data) % 8:
        raise InvalidRequestError(f"sequence {index}: spans has {len(data)} bytes, which is not a multiple of 8.")
    return tuple((int(start), int(end)) for start, end in np.frombuffer(data, "<u4").reshape(-1, 2))


def whole(item: ScoreItem) -> ScoreItem:
    """The item without spans: all positions are asked for, those that are not wanted at the ids 0 to K - 1."""
    if not item.spans:
        return item
    ids = item.gather_ids
    return replace(item, gather_ids=None if ids is None else _spread(item, ids), spans=())


def cut(scores: Scores, item: ScoreItem) -> Scores:
    """Scores of all response positions [T, ...], as those of the wanted ones alone [N, ...]."""
    if not item.spans:
        return scores
    found = {name: getattr(scores, name) for name in _BY_POSITION}
    fields: dict[str, Any] = {name: item.pick(array) for name, array in found.items() if array is not None}
    return replace(scores, **fields)


def put_back(parts: Sequence[tuple[Scores, ScoreItem, int]], length: int, gather_ids: U32 | None = None) -> Scores:
    """Scores of some positions of a response, from one request or several, as those of all its positions [T, ...].

    The positions that none asked for hold placeholders that are finite and belong to no model: equal log-probs of the K
    ids and the tail, and hidden states and logits of zero. Who reads them reads a position that nothing is learnt from.

    Args:
        parts: (what was answered, what was asked, the position of the whole response at which that item's begins).
        length: T.
        gather_ids: [T, K], for payload gather, the ids of all positions; None for 0 to K - 1 at those not asked for.
    """
    first = parts[0][0]
    places = [offset + item.pick(np.arange(item.response_length)) for _, item, offset in parts]
    # One request for all positions: nothing to put back, so nothing is copied.
    if len(parts) == 1 and len(places[0]) == length:
        return first
    fields: dict[str, Any] = {}
    # K ids and the tail share the mass equally, so placeholders too add up to 1.
    even = -np.log(1.0 + (first.values.shape[1] if first.values is not None else 1))
    for name in _BY_POSITION:
        arrays = [getattr(scores, name) for scores, _, _ in parts]
        if arrays[0] is None:
            continue
        # A server widens to f32 where it must (`layout_of`), so the parts may be of two types.
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
    """[T, K] ids with `rows` at the wanted positions, and 0 to K - 1 elsewhere."""
    out = np.empty((item.response_length, *rows.shape[1:]), rows.dtype)
    out[...] = _first_ids(rows)
    out[item.pick(np.arange(item.response_length))] = rows
    return out
