"""Splits rows into micro-batches and lays them out as tensors: right-padded sequences, flat response positions."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opd.heads import OutputHead, from_bits
from opd.wire.types import PayloadKind, Scores
from student.data.prefixes import Prefixes, cut
from student.data.row import Row
from student.data.token_batch import SignalTokens, TokenBatch

HeadLookup = Callable[[str, Row], OutputHead]


def split(
    rows: Sequence[Row],
    max_tokens: int,
    *,
    turn: int | None,
    by_teacher: bool = False,
    shortest_first: bool = False,
) -> list[list[int]]:
    """Indices of the rows of each micro-batch: rows of similar length together, padded size within `max_tokens`.

    Rows are ordered by length, longest first, and then by index. The largest micro-batch comes first, so that a lack of
    memory shows at once. `shortest_first` gives the order in which rows tend to be sampled and scored. A single row
    over the budget gets a micro-batch of its own.

    Args:
        rows: the step's rows.
        max_tokens: bound on sequences times padded length of a micro-batch.
        turn: tokens beyond which a row would change the positions of those it shares a forward with; None for none
            (`Student.turn`).
        by_teacher: keep rows of different teachers apart, because a hidden payload has one head per teacher. Always
            done where divergences to several teachers are summed.
        shortest_first: by length upwards.
    """
    by_teacher = by_teacher or any(row.teachers for row in rows)
    lengths = [row.longest for row in rows]
    apart = [(row.teacher, row.teachers) if by_teacher else ("", ()) for row in rows]
    # A function of the rows alone: the order decides the sums, and a resumed run must get the same bits.
    sign = 1 if shortest_first else -1
    order = sorted(range(len(rows)), key=lambda i: (apart[i], sign * lengths[i], i))
    added = [len(row.sequences) for row in rows]
    parts = packed(order, lengths, max_tokens, turn=turn, apart=apart, added=added)
    # If rows of several teachers are kept apart, order across teachers, so that a slow one does not delay the others.
    return sorted(parts, key=lambda part: lengths[part[-1]]) if shortest_first else parts


def packed(
    order: Iterable[int],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    turn: int | None,
    apart: Sequence[object] | None = None,
    added: Sequence[int] | None = None,
) -> list[list[int]]:
    """Indices of the rows of each forward pass, in order of length, padded size within `max_tokens`.

    Args:
        order: the rows, in ascending or descending order of length among those that may share a pass.
        lengths: number of tokens of each row.
        max_tokens: see `split`.
        turn: see `split`.
        apart: rows with different values are kept apart; None if all may share a pass.
        added: number of sequences of each row; None for one each.
    """
    parts: list[list[int]] = []
    kind: object = None
    count = 0
    for index in order:
        length, more = lengths[index], 1 if added is None else added[index]
        mine = (turn is not None and length > turn, None if apart is None else apart[index])
        # All sequences are padded to the longest, which is the first or the last.
        if parts and mine == kind and max(lengths[parts[-1][0]], length) * (count + more) <= max_tokens:
            parts[-1].append(index)
            count += more
        else:
            parts.append([index])
            kind, count = mine, more
    return parts


def collate(rows: Sequence[Row], indices: Sequence[int], device: torch.device, *, shared: bool = False) -> TokenBatch:
    """Lay out rows[i] for i in `indices` as tensors on `device`, as yet without student and signals.

    With `shared`, what sequences of one prompt have in common is laid out once, in `TokenBatch.prefixes`.
    """
    chosen = [rows[i] for i in indices]
    lengths = [row.length for row in chosen]
    ends = np.cumsum(lengths)
    row_of = np.repeat(np.arange(len(chosen)), lengths)
    position = np.arange(ends[-1]) - (ends - lengths)[row_of]
    # Of rows that are one sequence; the state before a token predicts it.
    counts = np.array([len(row.sequences) for row in chosen])
    firsts = np.cumsum(counts) - counts
    sequence = firsts[row_of]
    source = position + np.array([len(row.prompt_ids) - 1 for row in chosen])[row_of]
    texts: list[NDArray[np.uint32]] = []
    for row, first, begin in zip(chosen, firsts.tolist(), (ends - lengths).tolist(), strict=True):
        prompt = len(row.prompt_ids)
        if row.windows:
            # Positions outside of all windows belong to the environment and are not trained on, so any state will do.
            source[begin : begin + row.length] = 0
        for b, (since, start, end) in enumerate(row.sequences, first):
            texts.append(np.concatenate([row.prompt_ids, row.response_ids[since:end]]))
            if row.windows:
                sequence[begin + start : begin + end] = b
                source[begin + start : begin + end] = prompt - 1 + np.arange(start - since, end - since)
    prefixes = None
    if shared:
        begins, of, texts = cut(texts, [row.prompt_ids.tobytes() for row in chosen for _ in row.sequences])
        arrays = (_padded(begins)[0], [*map(len, begins)], of)
        prefixes = Prefixes(*(_tensor(np.array(array, np.int64), device) for array in arrays))
    ids, attention = _padded(texts)
    candidates = None  # [N, K] cannot have gaps: if one row lacks candidates, the micro-batch has none
    if all(row.candidates is not None for row in chosen):
        candidates = _tensor(np.concatenate([row.candidates for row in chosen]).astype(np.int64), device)  # type: ignore[arg-type, misc]
    mask = _flat((row.loss_mask for row in chosen), device)
    return TokenBatch(
        token_ids=_flat((row.response_ids.astype(np.int64) for row in chosen), device),
        mask=mask,
        weights=mask.float(),
        row=_tensor(row_of, device),
        position=_tensor(position, device),
        behaviour_logp=_flat((row.behaviour_logp for row in chosen), device),
        candidates=candidates,
        rows=tuple(chosen),
        input_ids=_tensor(ids, device),
        attention_mask=_tensor(attention, device),
        sequence=_tensor(sequence, device),
        source=_tensor(source, device),
        prefixes=prefixes,
    )


def _padded(texts: Sequence[NDArray[np.uint32]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B, L] the texts, right-padded with 0, and where they are: 1, and 0 where padded."""
    ids = np.zeros((len(texts), max(1, *map(len, texts))), np.int64)
    attention = np.zeros_like(ids)
    for line, text in enumerate(texts):
        ids[line, : len(text)], attention[line, : len(text)] = text, 1
    return ids, attention


def signal_tokens(
    rows: Sequence[Row], role: str, kind: PayloadKind, head_of: HeadLookup, device: torch.device
) -> SignalTokens:
    """The signals of `rows` for (role, kind), concatenated over response positions, float32 on `device`.

    Args:
        rows: rows of a micro-batch, all scored for the role.
        role: "teacher", "reference", or the `teacher_role` of one of several.
        kind: the payload kind.
        head_of: the head of the model that a role means for a row; called for hidden payloads.
        device: where the tensors go.
    """
    scores: list[Scores] = [row.signals[role, kind] for row in rows]
    # `split` keeps rows with different heads apart.
    head = head_of(role, rows[0]) if kind is PayloadKind.HIDDEN else None

    def joined(name: str) -> Tensor | None:
        parts = [getattr(score, name) for score in scores]
        return None if parts[0] is None else _float(np.concatenate(parts), device)

    ids = None
    if scores[0].ids is not None:
        ids = _flat((score.ids.astype(np.int64) for score in scores if score.ids is not None), device)
    return SignalTokens(
        sampled=joined("sampled"),
        span=_spans(rows, scores, device),
        values=joined("values"),
        ids=ids,
        log_tail=joined("log_tail"),
        hidden=joined("hidden"),
        head=head,
        logits=joined("logits"),
    )


def _spans(rows: Sequence[Row], scores: Sequence[Scores], device: torch.device) -> Tensor | None:
    """[N] where each position's span begins, among all positions; None if no row has any."""
    if all(score.span is None for score in scores):
        return None
    begins = np.cumsum([0, *(row.length for row in rows)])
    parts = [np.arange(row.length) if s.span is None else s.span for row, s in zip(rows, scores, strict=True)]
    return _flat((np.where(part < 0, -1, part + begin) for part, begin in zip(parts, begins, strict=False)), device)


def _float(array: np.ndarray, device: torch.device) -> Tensor:
    return from_bits(_tensor(array, device)).float()


def _flat(parts: Iterable[np.ndarray], device: torch.device) -> Tensor:
    return _tensor(np.concatenate(list(parts)), device)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return host.to(device)
    # The copy from pinned memory is asynchronous, so the host continues at once.
    return host.pin_memory().to(device, non_blocking=True)
