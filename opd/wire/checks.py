"""Plausibility checks of a teacher's numbers, before they reach a loss.

Impossible numbers, from a faulty server or a flipped bit, fail the call. Numbers that are possible but come from
another model pass; those are found by comparing replicas (`opd.fleet.membership.agreement`, `opd.fleet.cross_score`).
All checks are vectorised and cost less than half a microsecond per token at K = 64. Every check raises
CorruptPayloadError.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError
from opd.wire.bounds import rows_are_distinct
from opd.wire.tensors import to_single
from opd.wire.types import F32, U32

BLOCK = 1 << 16
"""Numbers checked at a time, so that temporaries stay in the cache and their pages are reused."""

MASS_TOLERANCE: dict[str, float] = {"f32": 2e-3, "f16": 1e-2, "u16": 1e-2}
"""How far a position's probabilities may be from 1 in sum; rounding to f16 changes it by at most 2^-11 x entropy."""

LOG_PROB_TOLERANCE = 1e-2
"""Nats by which rounding may put a log-prob above zero."""

MATCH_TOLERANCE = 5e-2
"""Nats, besides 2^-10 of its size, by which a response token's log-prob may differ from that of the same id."""


def check_log_probs(name: str, values: NDArray[Any]) -> None:
    """Refuse NaN, +inf and log-probs above zero; -inf, probability zero, is allowed."""
    # The maximum of anything with NaN is NaN, which compares false, so the test says what must be true.
    if not values.max() <= LOG_PROB_TOLERANCE:
        raise CorruptPayloadError(f"{name} holds NaN or a log-prob above zero.")


def check_logits(logits: F32) -> None:
    """Refuse [T, V] logits with NaN or +inf, or with a row without any finite value."""
    if not (logits < np.inf).all() or not np.isfinite(logits.max(axis=1)).all():
        raise CorruptPayloadError("the logits hold NaN or +inf, or a row without a finite value.")


def check_hidden(hidden: NDArray[Any]) -> None:
    """Refuse [T, H] hidden states that are not finite; uint16 holds the bits of bfloat16."""
    fine = finite_bf16(hidden) if hidden.dtype == np.uint16 else hidden.max() < np.inf and hidden.min() > -np.inf
    if not fine:
        raise CorruptPayloadError("the hidden states hold NaN or infinity.")


def finite_bf16(bits: NDArray[np.uint16]) -> bool:
    """Whether bfloat16 bits hold neither NaN nor infinity; without temporaries, which would cost more than the test."""
    # As signed numbers the largest positive values are on top; as unsigned numbers the largest negative ones.
    return bool(bits.view(np.int16).max() < 0x7F80 and bits.max() < 0xFF80)


def check_top_ids(ids: U32, values: NDArray[Any], vocab_size: int) -> None:
    """Refuse [T, K] top-k ids that are outside the vocabulary or repeat, and values not in descending order."""
    if int(ids.max()) >= vocab_size:
        raise CorruptPayloadError(f"top-k id {int(ids.max())} is outside the vocabulary of {vocab_size}.")
    if not rows_are_distinct(ids):
        raise CorruptPayloadError("a top-k id is listed twice at one position.")
    if not (values[:, 1:] <= values[:, :-1]).all():
        raise CorruptPayloadError("top-k log-probs are not in descending order.")


def check_positions(
    sampled: F32,
    response: U32,
    ids: U32,
    values: NDArray[Any],
    log_tail: F32,
    *,
    vocab_size: int | None,
    tolerance: float,
) -> None:
    """All checks of a sequence's log-probs at K ids per position.

    Args:
        sampled: [T] log-probs of the response tokens.
        response: [T] the response tokens.
        ids: [T, K].
        values: [T, K] log-probs at the ids, f16 or f32.
        log_tail: [T] log mass outside the ids.
        vocab_size: the teacher's, for top-k; None for gathered values, whose ids the caller chose.
        tolerance: how far the mass of a position may be from 1; see `check_mass`.
    """
    check_log_probs("sampled", sampled)
    check_log_probs("log_tail", log_tail)
    rows = max(1, BLOCK // values.shape[1])
    for first in range(0, len(values), rows):
        part = slice(first, first + rows)
        wide = to_single(values[part])
        check_log_probs("values", wide)
        if vocab_size is not None:
            check_top_ids(ids[part], wide, vocab_size)
        check_mass(wide, log_tail[part], tolerance, first)
        topk = vocab_size is not None
        check_sampled(sampled[part], response[part], ids[part], wide, log_tail[part], topk=topk, first=first)


def check_mass(values: F32, log_tail: F32, tolerance: float, first: int = 0) -> None:
    """Refuse positions whose probabilities, tail included, do not sum to 1; `first` is the index of the first row."""
    mass = np.exp(values).sum(axis=1) + np.exp(log_tail)
    worst = float(np.abs(mass - 1).max())
    if not worst <= tolerance:
        row = int(np.argmax(np.abs(mass - 1)))
        raise CorruptPayloadError(
            f"the probabilities at response token {first + row}, tail included, add up to {float(mass[row]):.4f} "
            "instead of 1."
        )


def check_sampled(
    sampled: F32, response: U32, ids: U32, values: F32, log_tail: F32, *, topk: bool, first: int = 0
) -> None:
    """Refuse a response token's log-prob that contradicts the K ids and the tail at its position.

    If the token is among the ids, both numbers must agree. Otherwise its probability is part of the tail and, for
    top-k, no larger than the smallest of the k. `first` is the index of the first row.
    """
    same = ids == response[:, None]
    place = same.argmax(axis=1)  # 0 also if the token is not among the ids, which `inside` tells apart
    lines = np.arange(len(same))
    inside, at = same[lines, place], values[lines, place]
    ceiling = np.minimum(log_tail, values[:, -1]) if topk else log_tail
    # f16 has a precision of 11 bits, so its rounding error grows with the size of a log-prob.
    slack = MATCH_TOLERANCE + np.abs(np.where(np.isfinite(sampled), sampled, 0)) * 2.0**-10
    # f16 ends at -65,504, so a log-prob that became -inf counts as that. If the token is not among the ids, `at` and
    # `near` have no meaning and are not used.
    near = np.abs(np.maximum(at, -65504) - np.maximum(sampled, -65504)) <= slack
    below = sampled <= np.maximum(ceiling, -65504) + slack
    good = np.where(inside, near, below)
    if not good.all():
        row = int(np.argmin(good))
        raise CorruptPayloadError(
            f"the log-prob of response token {first + row} contradicts the listed log-probs at its position."
        )
