"""Reduction of logits to payloads on the device, in float32, before anything is copied to the host.

Letters in shapes: N response rows of one payload, V rows of the vocabulary, K ids per row, H width of the hidden state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from opd.heads import OutputHead
from opd.maths.blocks import row_blocks
from opd.wire.types import PayloadKind, PayloadSpec

BYTES_PER_LOGIT = 4  # float32; temporaries are as large as a row block, see opd.maths.blocks

VALUE_DTYPES = {"f16": torch.float16, "f32": torch.float32, "u16": torch.float32, "bf16": torch.bfloat16}
_SMALLEST_HALF = -65504.0


@dataclass(frozen=True, slots=True, eq=False)
class PayloadRows:
    """Response rows of one payload, ready to be projected by the head.

    Attributes:
        hidden: [N, H] hidden states after the final norm; row n predicts `targets[n]`.
        targets: [N] int64 response tokens.
        temperature: [N] float32.
        gather_ids: [N, K] int64 for payload gather; else None.
        ranks: whether the ranks of the targets are wanted.
    """

    hidden: Float[Tensor, "N H"]
    targets: Int[Tensor, " N"]
    temperature: Float[Tensor, " N"]
    gather_ids: Int[Tensor, "N K"] | None = None
    ranks: bool = False


def reduce_rows(
    rows: PayloadRows, spec: PayloadSpec, head: OutputHead, logit_bytes: int, least_rows: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Reduce rows to a payload: project a large block of them, then reduce a few at a time.

    Args:
        rows: the rows.
        spec: the payload.
        head: the head that projects hidden states to logits.
        logit_bytes: bytes that the logits of a block may take on the device.
        least_rows: least number of rows in a block; a shorter block is filled up with rows that are discarded again.

    Yields:
        For some rows at a time, in order: `finite` [n] bool, False where the model produced NaN or infinity, and the
        fields of `opd.wire.types.Scores` that the payload carries, as tensors on the device (ids as int32).
    """
    block = max(least_rows, logit_bytes // (BYTES_PER_LOGIT * len(head.weight)))
    if spec.kind is PayloadKind.HIDDEN:
        block = max(1, logit_bytes // (4 * rows.hidden.shape[1]))
    for first in range(0, len(rows.hidden), block):
        part = _part(rows, slice(first, first + block))
        if spec.kind is PayloadKind.HIDDEN:
            hidden = part.hidden
            yield {"finite": hidden.isfinite().all(-1), "hidden": hidden.to(VALUE_DTYPES[spec.value_dtype])}
            continue
        count = len(part.hidden)
        if count < least_rows:
            part = _filled(part, least_rows - count)
        # Dividing by 1.0 is exact, so a row does not depend on the temperatures of its neighbours.
        logits = head.logits(part.hidden).div_(part.temperature[:, None])
        for few in row_blocks(logits[:count]):
            of = _part(part, few)
            yield reduce_logits(logits[few], spec, of.targets, of.gather_ids, ranks=of.ranks)


def _part(rows: PayloadRows, part: slice) -> PayloadRows:
    gather_ids = None if rows.gather_ids is None else rows.gather_ids[part]
    return PayloadRows(rows.hidden[part], rows.targets[part], rows.temperature[part], gather_ids, rows.ranks)


def _filled(rows: PayloadRows, more: int) -> PayloadRows:
    """`rows`, followed by `more` rows with zero hidden states, token 0 and temperature 1."""
    fill = torch.nn.functional.pad
    return PayloadRows(
        hidden=fill(rows.hidden, (0, 0, 0, more)),
        targets=fill(rows.targets, (0, more)),
        temperature=fill(rows.temperature, (0, more), value=1.0),
        gather_ids=None if rows.gather_ids is None else fill(rows.gather_ids, (0, 0, 0, more)),
        ranks=rows.ranks,
    )


def reduce_logits(
    logits: Float[Tensor, "N V"],
    spec: PayloadSpec,
    targets: Int[Tensor, " N"],
    gather_ids: Int[Tensor, "N K"] | None,
    *,
    ranks: bool = False,
) -> dict[str, Tensor]:
    """The payload of a block of float32 logits whose temperature is applied; overwrites `logits`.

    Log-probs are normalised over all V rows. The tail is a logsumexp over the complement of the K ids, not log(1 -
    sum): it is accurate even if tiny, and -inf if K is V.
    """
    if spec.kind is PayloadKind.FULL:
        return {"finite": logits.isfinite().all(-1), "logits": logits}
    normaliser = torch.logsumexp(logits, -1)
    # Everything is read before `scatter_` below destroys the logits; a copy of [N, V] would double the memory.
    own = logits.gather(-1, targets[:, None])
    sampled = own.squeeze(-1) - normaliser
    out = {"finite": normaliser.isfinite() & sampled.isfinite(), "sampled": sampled}
    if ranks:
        out["ranks"] = (1 + (logits > own).sum(-1)).to(torch.int32)
    if spec.kind is PayloadKind.SAMPLED:
        return out
    if spec.kind is PayloadKind.TOPK:
        values, ids = torch.topk(logits, spec.k, dim=-1)
        out["ids"] = ids.to(torch.int32)
    else:
        if gather_ids is None:
            raise ValueError("gather_ids is None, but payload gather needs ids of shape [T, K].")
        ids = gather_ids
        values = logits.gather(-1, ids)
    values = values - normaliser[:, None]
    if spec.value_dtype == "f16":
        values = values.clamp_(min=_SMALLEST_HALF)  # saturate, because f16 would turn a finite log-prob into -inf
    out["values"] = values.to(VALUE_DTYPES[spec.value_dtype])
    out["log_tail"] = torch.logsumexp(logits.scatter_(-1, ids, -torch.inf), -1) - normaliser
    return out
