"""Handling of rows that the student did not sample (origin expert), whose tokens no estimator may treat as samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from student.data.token_batch import TokenBatch


def untied_tokens(batch: TokenBatch, candidates: Int[Tensor, "n k"]) -> Int[Tensor, " n"]:
    """[N] response tokens; on given rows they are replaced by the first candidate.

    `head_tail_reverse_kl` then sees a token of the head (the candidates), sums the head exactly and has no sample from
    the tail. The tail contributes sg(p_tail c) log p_tail, where c, an estimate of the tail's mean log-ratio, stands
    for all its tokens (0 without a teacher tail; see `opd.maths.head_tail`). Without the replacement, a token that
    another model chose could be taken for a sample from the student's tail.
    """
    import torch

    given = batch.of_rows([not row.on_policy for row in batch.rows])
    return torch.where(given, candidates[:, 0], batch.token_ids)
