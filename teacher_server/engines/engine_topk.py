"""From an engine's own top-k lists to `Scores`: validated, and with the log tail that such lists allow.

vLLM and SGLang return log-probs of the k most likely ids, normalised over the vocabulary, and of the response token;
the logits outside stay in the engine. The tail is therefore 1 minus the listed mass, in f64: its error is that of the
listed f32 log-probs, about 1e-7 x K of probability, so a tail below that is reported as `SMALLEST_TAIL`, never as less.
"""

import math

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, NonFiniteError
from opd.wire.types import F32, U32, Scores

# Spacing of f32 just below 1: the smallest mass that a sum of f32 probabilities can tell from nothing.
SMALLEST_TAIL = 2.0**-24


def log_tail(values: F32, vocabulary: int) -> F32:
    """[T] log mass outside the listed log-probs [T, K]; -inf only when K is the whole vocabulary."""
    if values.shape[-1] >= vocabulary:
        return np.full(values.shape[0], -np.inf, np.float32)
    listed = np.exp(values.astype(np.float64)).sum(-1)
    tail: F32 = np.log(np.maximum(1.0 - listed, SMALLEST_TAIL)).astype(np.float32)
    return tail


def from_lists(
    sampled: F32,
    ids: NDArray[np.integer] | None,
    values: F32 | None,
    *,
    value_dtype: str,
    vocabulary: int,
    teacher: str,
) -> Scores:
    """`Scores` of one sequence.

    Args:
        sampled: [T] log-probs of the response tokens.
        ids: [T, K] listed ids, or None for payload sampled.
        values: [T, K] their log-probs.
        value_dtype: "f16" or anything else for f32.
        vocabulary: number of rows of the logits.
        teacher: name for errors.

    Raises:
        NonFiniteError: when a log-prob is NaN, positive beyond rounding, or infinite.
        CorruptPayloadError: when a listed id is outside the vocabulary.
    """
    for array in (sampled, values):
        if array is not None and not (np.isfinite(array).all() and float(array.max(initial=-math.inf)) < 1e-3):
            raise NonFiniteError(f"teacher {teacher} returned a log-prob that is not one; check its weights and dtype.")
    if ids is None or values is None:
        return Scores(sampled=sampled)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise CorruptPayloadError(
            f"teacher {teacher} listed ids from {ids.min()} to {ids.max()}, outside its vocabulary of {vocabulary}."
        )
    unsigned: U32 = ids.astype(np.uint32)
    tail = log_tail(values, vocabulary)
    carried = np.maximum(values, -65504.0).astype(np.float16) if value_dtype == "f16" else values
    return Scores(sampled=sampled, ids=unsigned, values=carried, log_tail=tail)
