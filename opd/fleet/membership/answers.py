"""How far apart two replicas' scores of the same row are, in nats, for every payload."""

import numpy as np
from numpy.typing import NDArray

from opd.fleet.membership.agreement import distance
from opd.wire.tensors import bf16_to_f32
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores

Array = NDArray[np.float64]

_MOST_NATS = 1000.0  # finite, so that a probability of 0 times a difference of inf is 0 instead of NaN
# The part of a hidden payload that is projected: [64, 256] logits suffice to tell replicas apart, whereas all of [T, V]
# would cost as much as the teacher's own head.
_POSITIONS = 64
_IDS = 256


def answer_distance(item: ScoreItem, spec: PayloadSpec, one: Scores, other: Scores, head: Head | None = None) -> float:
    """The largest difference over the response positions, in nats; inf if the two do not have the same shape.

    * sampled: max |d log p| of the response tokens.
    * topk, gather: the larger of that and the maximum over positions of the sum of p |d log p| over the listed ids and
      the tail, where p is the larger of the two probabilities, so that ids that both find unlikely hardly count.
    * hidden: max |d logit| at up to 64 positions, for up to 256 ids and the response tokens. Each position's mean is
      removed, because a softmax does not see it. Needs the head.
    * full: the maximum over positions of the sum over the vocabulary of p |d log p|.

    Args:
        item: the row.
        spec: its payload.
        one: scores from one replica.
        other: scores from another replica.
        head: the teacher's head, for hidden states.
    """
    if spec.kind is PayloadKind.HIDDEN:
        return _hidden_distance(item, one, other, head)
    if spec.kind is PayloadKind.FULL:
        if one.logits is None or other.logits is None or one.logits.shape != other.logits.shape:
            return float("inf")
        mine, theirs = _log_softmax(one.logits), _log_softmax(other.logits)
        return float(_weighted(mine, theirs).sum(1).max(initial=0.0))
    if one.sampled is None or other.sampled is None:
        return float("inf")
    gap = distance(one.sampled, other.sampled)
    if spec.kind is PayloadKind.SAMPLED:
        return gap
    return max(gap, _head_distance(spec, one, other))


def _head_distance(spec: PayloadSpec, one: Scores, other: Scores) -> float:
    parts = [getattr(scores, name) for scores in (one, other) for name in ("values", "ids", "log_tail")]
    if any(part is None for part in parts) or parts[0].shape != parts[3].shape:
        return float("inf")
    mine, my_ids, my_tail, theirs, their_ids, their_tail = parts
    mine, theirs = mine.astype(np.float64), theirs.astype(np.float64)
    # The tail counts as one more id.
    tail = _weighted(my_tail.astype(np.float64), their_tail.astype(np.float64))
    if spec.kind is PayloadKind.GATHER:
        return float((_weighted(mine, theirs).sum(1) + tail).max(initial=0.0))
    found, back = _look_up(theirs, their_ids, my_ids), _look_up(mine, my_ids, their_ids)
    # For an id that only one side lists, the other side's value is at most its smallest listed one.
    ours = np.where(np.isnan(found), _excess(mine, theirs), _weighted(mine, found)).sum(1)
    only_theirs = np.where(np.isnan(back), _excess(theirs, mine), 0.0).sum(1)
    return float((ours + only_theirs + tail).max(initial=0.0))


def _look_up(values: Array, ids: NDArray[np.integer], wanted: NDArray[np.integer]) -> Array:
    """[T, K] the value of each wanted id at its position; NaN if it is not among the position's ids."""
    # Position and id in one integer allow a single sort and search instead of a loop over positions.
    rows = np.arange(len(ids), dtype=np.int64)[:, None] << 32
    keys, asked = (rows + ids).ravel(), (rows + wanted).ravel()
    order = np.argsort(keys)
    at = np.minimum(np.searchsorted(keys, asked, sorter=order), len(keys) - 1)
    place = order[at]
    return np.where(keys[place] == asked, values.ravel()[place], np.nan).reshape(wanted.shape)


def _excess(values: Array, others: Array) -> Array:
    """[T, K] a lower bound of p |d log p| for ids that are missing from `others`."""
    least = others.min(1, keepdims=True)
    return _weighted(values, np.minimum(values, least))


def _weighted(one: Array, other: Array) -> Array:
    """Elementwise p |d log p| with the larger p; equal infinities differ by 0, and no difference exceeds 1,000 nats."""
    with np.errstate(invalid="ignore"):
        gap = np.where(one == other, 0.0, np.minimum(np.abs(one - other), _MOST_NATS))
        return np.asarray(np.exp(np.minimum(np.fmax(one, other), 0.0)) * gap)


def _hidden_distance(item: ScoreItem, one: Scores, other: Scores, head: Head | None) -> float:
    if head is None:
        raise ValueError("head is None; hidden states are compared through the teacher's output head, so give it")
    if one.hidden is None or other.hidden is None or one.hidden.shape != other.hidden.shape:
        return float("inf")
    length, vocab = len(one.hidden), len(head.weight)
    at = np.unique(np.linspace(0, length - 1, min(length, _POSITIONS)).astype(np.int64))
    ids = np.unique(np.linspace(0, vocab - 1, min(vocab, _IDS)).astype(np.int64))
    ids = np.union1d(ids, np.asarray(item.scored_ids)[at].astype(np.int64))
    gap = _logits(one.hidden[at], head, ids) - _logits(other.hidden[at], head, ids)
    return float(np.nan_to_num(np.abs(gap - gap.mean(1, keepdims=True)), nan=np.inf).max(initial=0.0))


def _logits(hidden: NDArray[np.generic], head: Head, ids: NDArray[np.int64]) -> Array:
    """[N, len(ids)] float64 logits of the given ids."""
    import torch  # here, because only the payload hidden needs the head's formula and `opd fleet` starts without torch

    from opd.heads import OutputHead

    bias = None if head.bias is None else torch.from_numpy(_plain(head.bias[ids]))
    chosen = OutputHead(torch.from_numpy(_plain(head.weight[ids])), bias, head.logit_scale, head.soft_cap)
    return np.asarray(chosen.logits(torch.from_numpy(_plain(hidden))).numpy())


def _plain(array: NDArray[np.generic]) -> Array:
    """The array in float64; uint16 holds the bits of bfloat16."""
    return np.asarray(bf16_to_f32(array.view(np.uint16)) if array.dtype == np.uint16 else array, np.float64)


def _log_softmax(logits: NDArray[np.floating]) -> Array:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))
