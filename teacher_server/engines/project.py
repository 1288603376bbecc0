"""From the hidden states of a batch to its scores: group rows by payload, project, copy to the host, cut apart.

Shared by the engines whose hidden states are in this process. Payloads are copied while the device computes the next
forward pass: on CUDA the host buffers are pinned and the copies asynchronous. Elsewhere they are synchronous: for other
accelerators there is no event to wait for here, so the host could read numbers that have not arrived.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.errors import NonFiniteError
from opd.heads import OutputHead
from opd.wire.types import U32, PayloadKind, PayloadSpec, ScoreItem, Scores
from teacher_server.engines.base import EngineInfo, EngineItem
from teacher_server.engines.payload import PayloadRows, reduce_rows


class HostCopy:
    """The payload rows of one group of sequences, on their way to the host.

    Args:
        blocks: dictionaries of device tensors with a common first dimension, in row order. They are consumed at once,
            so that the logits of a block are freed before the next block is computed.
        rows: total number of rows.
    """

    def __init__(self, blocks: Iterable[dict[str, Tensor]], rows: int) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        first = 0
        device = torch.device("cpu")
        for block in blocks:
            count = len(block["finite"])
            for name, tensor in block.items():
                device = tensor.device
                cuda = device.type == "cuda"
                if name not in self._buffers:  # one buffer for all blocks: pinning memory is slow
                    shape = (rows, *tensor.shape[1:])
                    self._buffers[name] = torch.empty(shape, dtype=tensor.dtype, pin_memory=cuda)
                self._buffers[name][first : first + count].copy_(tensor, non_blocking=cuda)
            first += count
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            # Recorded after the copies of all blocks, so that it completes after them.
            self._event.record(torch.cuda.current_stream(device))

    def split(self, lengths: Sequence[int], weights_hash: str) -> list[Scores | None]:
        """Wait for the copies and cut the rows into one `Scores` per sequence; None for a sequence that is not finite.

        Each sequence owns its memory: the server's budget gives back a sequence once it is sent, so the row of a slow
        reader must not hold those of a whole group.
        """
        if self._event is not None:
            self._event.synchronize()
        arrays = {name: _numpy(tensor) for name, tensor in self._buffers.items()}
        finite = arrays.pop("finite")
        alone = len(lengths) == 1
        out: list[Scores | None] = []
        first = 0
        for length in lengths:
            part = slice(first, first + length)
            fields: dict[str, Any] = {name: array if alone else array[part].copy() for name, array in arrays.items()}
            out.append(Scores(**fields, weights_hash=weights_hash) if finite[part].all() else None)
            first += length
        return out


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; on CUDA, queued behind the kernels launched before it, without waiting for them.

    Only a copy from pinned memory never waits.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.int32:
        return tensor.numpy().view(np.uint32)
    return tensor.numpy()


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
    by_spec: dict[tuple[PayloadSpec, bool], list[int]] = {}
    for index, row in enumerate(rows):
        by_spec.setdefault((batch[row].spec, batch[row].ranks), []).append(index)
    started = []
    for (spec, _), members in by_spec.items():
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
        ranks=entries[0].ranks,
    )


def _ids(arrays: Sequence[U32], device: torch.device) -> Int[Tensor, "N ..."]:
    return to_device(torch.cat([torch.from_numpy(array.astype("int64")) for array in arrays]), device)
