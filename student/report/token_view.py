"""A response token by token, for readers: text, divergence, and the teacher's most likely tokens."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.wire.types import PayloadKind
from student.data.needs import TEACHER
from student.data.row import Row

if TYPE_CHECKING:
    from torch import Tensor

    from opd.heads import OutputHead
    from student.data.token_batch import TokenBatch

ALTERNATIVES = 3
LONGEST = 512
"""Maximum number of tokens of a response that are kept."""
_TILE = 32
"""Number of positions whose full logits are computed at a time."""
View = list[tuple[float | None, list[tuple[int, float]]]]
"""For each token: divergence in nats, None if unknown; the teacher's most likely ids with their probabilities."""


def view_of_row(row: Row) -> tuple[str, View]:
    """The view from a row's signals, without a model: log-ratios log S - log T of the sampled tokens.

    Returns:
        ("log_ratio", view); the view is empty if no teacher's log-probs of the tokens are known.
    """
    for (role, _), scores in row.signals.items():
        if role.partition("/")[0] != TEACHER or scores.sampled is None:
            continue
        ratios = (row.behaviour_logp - scores.sampled)[:LONGEST].astype(np.float64)
        known = np.isfinite(ratios) & row.loss_mask[:LONGEST]
        best: list[list[tuple[int, float]]] = [[] for _ in ratios]
        if scores.values is not None and scores.ids is not None:
            pairs = zip(scores.ids[:LONGEST], scores.values, row.loss_mask, strict=False)
            best = [_best(ids, values) if trained else [] for ids, values, trained in pairs]
        return "log_ratio", [
            (float(ratio) if ok else None, likely) for ratio, ok, likely in zip(ratios, known, best, strict=True)
        ]
    return "log_ratio", []


def _best(ids: "np.ndarray[Any, Any]", values: "np.ndarray[Any, Any]") -> list[tuple[int, float]]:
    order = np.argsort(-values.astype(np.float64), kind="stable")[:ALTERNATIVES]
    return [(int(ids[i]), math.exp(float(values[i]))) for i in order]


def view_of_batch(batch: "TokenBatch") -> View:
    """Exact reverse KL and the teacher's most likely tokens, from the hidden states of one row's positions.

    Args:
        batch: a batch of one row, with the teacher's payload hidden and the student's hidden states.

    Returns:
        The view of the row's first positions; empty if the batch lacks either.
    """
    signal = batch.signals.get((TEACHER, PayloadKind.HIDDEN))
    if signal is None or signal.head is None or batch.student.head is None:
        return []
    student, teacher = batch.student.hidden, signal.hidden
    if student is None or teacher is None:
        return []
    view: View = []
    for start in range(0, min(LONGEST, len(batch.token_ids)), _TILE):
        tile = slice(start, min(start + _TILE, LONGEST))
        ours = _log_probs(student[tile], batch.student.head, batch)
        theirs = _log_probs(teacher[tile], signal.head, batch)
        # For an id with student probability 0 this is 0 times infinity, which counts as 0.
        kl = (ours.exp() * (ours - theirs)).nan_to_num(0.0).sum(-1)
        likely = theirs.topk(min(ALTERNATIVES, theirs.shape[-1]), dim=-1)
        for value, ids, logp in zip(kl.tolist(), likely.indices.tolist(), likely.values.exp().tolist(), strict=True):
            view.append((value, list(zip(ids, logp, strict=True))))
    masked = (~batch.mask).tolist()
    return [(None, []) if skip else (value, likely) for (value, likely), skip in zip(view, masked, strict=False)]


def _log_probs(hidden: "Tensor", head: "OutputHead", batch: "TokenBatch") -> "Tensor":
    """[n, V] float32 log-probs of the valid vocabulary at the training temperature."""
    logits = head.logits(hidden)
    return (logits[:, : batch.valid_vocab] / batch.temperature).log_softmax(-1)


def pieces(ids: Sequence[int], view: View, tokenizer: Any) -> Iterator[list[Any]]:
    """[text, divergence, [[alternative, probability], ...]] of each token, rounded for a file."""
    spell: dict[int, str] = {}

    def text(token: int) -> str:
        if token not in spell:
            spell[token] = tokenizer.decode([token])
        return spell[token]

    for token, (value, likely) in zip(ids, view, strict=False):
        near = [[text(other), round(probability, 4)] for other, probability in likely]
        yield [text(int(token)), None if value is None else round(value, 4), near]
