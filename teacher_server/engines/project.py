"""From the hidden states of a batch to its scores: group rows by payload, project, copy to the host, cut apart.

Shared by the engines whose hidden states are in this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.errors import NonFiniteError
from opd.heads import OutputHead
from opd.wire.types import U32, PayloadKind, PayloadSpec, ScoreItem, Scores
from teacher_server.engines.base import EngineInfo, EngineItem
from teacher_server.engines.host_copy import HostCopy, to_device
from teacher_server.engines.payload import PayloadRows, reduce_rows


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """Payloads that are on their way to the host, and the rows of the batch that they belong to."""

    rows: tuple[int, ...]
    copy: HostCopy


LEAST_ROWS = 16
"""Least number of rows that go through the head together in deterministic mode; see `plan.settled_width`."""


def start(
    states: Float[Tensor, "N H"],
    rows: Sequence[int],
    batch: Sequence[EngineItem],
    head: OutputHead,
    logit_bytes: int,
    least_rows: int = 1,
) -> list[Started]:
    """Reduce hidden states to payloads and start copying them; rows with the same payload are reduced together.

    Args:
        states: hidden states of the response positions of `rows`, sequence after sequence, on the head's device.
        rows: indices into `batch`.
        batch: the batch.
        head: the output head.
        logit_bytes: bytes of logits that may exist at once.
        least_rows: least number of rows that go through the head together; see `reduce_rows`.
    """
    parts = states.split([batch[row].item.response_length for row in rows])
    if any(batch[row].item.spans for row in rows):
        # Before the projection, so that what the environment of an episode wrote costs none.
        parts = [_wanted(part, batch[row].item) for part, row in zip(parts, rows, strict=True)]
        states = torch.cat(parts)
    by_spec: dict[PayloadSpec, list[int]] = {}
    for index, row in enumerate(rows):
        by_spec.setdefault(batch[row].spec, []).append(index)
    started = []
    for spec, members in by_spec.items():
        hidden = states if len(members) == len(rows) else torch.cat([parts[index] for index in members])
        chosen = [rows[index] for index in members]
        payload_rows = _rows(hidden, [batch[row] for row in chosen], spec)
        blocks = reduce_rows(payload_rows, spec, head, logit_bytes, least_rows)
        started.append(Started(tuple(chosen), HostCopy(blocks, len(hidden))))
    return started


def finish(started: Sequence[Started], batch: Sequence[EngineItem], out: list[Scores | None], info: EngineInfo) -> None:
    """Wait for the copies and put one `Scores` per row into `out`.

    Raises:
        NonFiniteError: if the model produced NaN or infinity for a row.
    """
    for group in started:
        lengths = [batch[row].item.scored_length for row in group.rows]
        for row, scores in zip(group.rows, group.copy.split(lengths, info.weights_hash), strict=True):
            item = batch[row].item
            if scores is None:
                raise NonFiniteError(
                    f"teacher {info.model} produced NaN or infinity for a sequence of {len(item.token_ids)} tokens in "
                    f"{info.compute_dtype}; check its weights, or serve it in bf16 or f32."
                )
            gathered = batch[row].spec.kind is PayloadKind.GATHER
            out[row] = replace(scores, ids=item.gather_ids) if gathered else scores


def _wanted(states: Float[Tensor, "T H"], item: ScoreItem) -> Float[Tensor, "N H"]:
    return torch.cat([states[start:end] for start, end in item.spans]) if item.spans else states


def _rows(hidden: Tensor, entries: Sequence[EngineItem], spec: PayloadSpec) -> PayloadRows:
    lengths = torch.tensor([entry.item.scored_length for entry in entries])
    temperature = torch.tensor([entry.temperature for entry in entries], dtype=torch.float32)
    gather = None
    if spec.kind is PayloadKind.GATHER:
        gather = _ids([entry.item.gather_ids for entry in entries if entry.item.gather_ids is not None], hidden.device)
    return PayloadRows(
        hidden=hidden,
        targets=_ids([entry.item.scored_ids for entry in entries], hidden.device),
        temperature=to_device(temperature.repeat_interleave(lengths), hidden.device),
        gather_ids=gather,
    )


def _ids(arrays: Sequence[U32], device: torch.device) -> Int[Tensor, "N ..."]:
    return to_device(torch.cat([torch.from_numpy(array.astype("int64")) for array in arrays]), device)
