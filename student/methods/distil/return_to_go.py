"""Discounted return-to-go: the effect of a token on the divergence at all later tokens (MiniLLM).

The gradient of the sequence divergence KL(S || T) has two parts per token:

    grad KL(S(.|s_t) || T(.|s_t))  +  G_t grad log S(y_t|s_t),     G_t = sum_{t' > t} discount^(t' - t) r_t'

with r_t = log S(y_t|s_t) - log T(y_t|s_t). On-policy distillation keeps only the first part ("discount 0"). With
discount 1 the sum is an unbiased gradient of the sequence KL, with a variance that grows with the length. MiniLLM
divides G_t by the number of remaining tokens so that short responses are not preferred; this bias is intended.

Source: MiniLLM, arXiv 2306.08543.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd.wire.types import PayloadKind
from student.data.needs import TEACHER
from student.data.token_batch import have

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from student.data.token_batch import TokenBatch


def future_sum(values: Float[Tensor, " n"], row: Int[Tensor, " n"], discount: float) -> Float[Tensor, " n"]:
    """Discounted sum over the later positions of the same row: out[i] = sum_{j > i} discount^(j - i) values[j].

    Args:
        values: [N], rows one after another.
        row: [N] index of the row, constant within a row.
        discount: in [0, 1].

    Returns:
        [N]; in ceil(log2 N) vectorised steps.
    """
    import torch

    total, shift = values, 1
    # After each round `total` holds the inclusive sums over windows of `shift` positions.
    while shift < len(values) and discount > 0:
        # Rows are stored one after another, so positions of the same row have no other row between them.
        later = torch.where(row[shift:] == row[:-shift], total[shift:], torch.zeros_like(total[shift:]))
        total = total + torch.nn.functional.pad(discount**shift * later, (0, shift))
        shift *= 2
    return total - values


def future_surrogate(
    batch: TokenBatch,
    discount: float,
    *,
    length_normalised: bool,
    role: str = TEACHER,
    ratio: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n"]:
    """A loss of value 0 per position whose gradient is G_t grad log S(y_t); 0 on rows the student did not sample.

    Args:
        batch: the batch, with the student's scores and the teacher's sampled log-probs.
        discount: in [0, 1].
        length_normalised: divide G_t by the number of later tokens of the row.
        role: role of the model whose log-probs are T.
        ratio: [N] r_t, if it is not the log-ratio of each token.

    Returns:
        [N] nats.
    """
    import numpy as np
    import torch

    scores = have(batch.student.scores, "scores")
    if ratio is None:
        teacher = have(batch.signal(PayloadKind.SAMPLED, role).sampled, "sampled log-probs")
        ratio = scores.sampled.detach() - teacher
    # The mask of the rows and not of the batch: a trained token is also responsible for later tokens that the batch
    # masks, for example those after a trained prefix.
    counts = torch.from_numpy(np.concatenate([row.loss_mask for row in batch.rows])).to(batch.mask.device)
    ratio = torch.where(counts, ratio, torch.zeros_like(ratio))
    future = future_sum(ratio, batch.row, discount)
    if length_normalised:
        future = future / future_sum(counts.to(future.dtype), batch.row, 1.0).clamp(min=1.0)
    sampled = batch.of_rows([row.on_policy for row in batch.rows])
    surrogate = torch.where(sampled & batch.mask, future * scores.sampled, torch.zeros_like(future))
    return surrogate - surrogate.detach()
