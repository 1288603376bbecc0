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
    # In float64: what the K leave is 1 minus a sum that is nearly 1.
    listed = np.exp(values.astype(np.float64)).sum(-1)
    tail: F32 = np.log(np.maximum(1.0 - listed, SMALLEST_TAIL)).astype(np.float32)
    return tail


def without_padding(
    sampled: F32, ids: NDArray[np.integer] | None, values: F32 | None, padding: F32, *, vocabulary: int, k: int
) -> tuple[F32, NDArray[np.integer] | None, F32 | None]:
    """Log-probs normalised over a padded head, normalised again over the ids that count.

    log p(i | i counts) = log p(i) - log(1 - mass of the padding rows), in f64: exact but for the rounding of the f32
    log-probs given, about 1e-7 over the mass that is left.

    Args:
        sampled: [T] log-probs of the response tokens.
        ids: [T, L] listed ids, at least `k` of each position below `vocabulary`, or None.
        values: [T, L] their log-probs, descending, or None.
        padding: [T, P] log-probs of all padding rows.
        vocabulary: V, the ids that count; padding rows have the ids V to V + P - 1.
        k: ids to keep of each position.

    Returns:
        The same of the ids that count: [T], [T, k], [T, k].

    Raises:
        CorruptPayloadError: when a listed id is beyond the padding rows.
        NonFiniteError: when the padding rows have all the mass.
    """
    # In float64: what padding rows leave is nearly 1, and its logarithm would be mostly rounding in float32.
    left = 1.0 - np.exp(padding.astype(np.float64)).sum(-1)
    if not (left > 0).all():
        raise NonFiniteError(
            "the padding rows of the head have all the probability; check the model and its tokenizer."
        )
    shift = np.log(left)
    sampled = (sampled - shift).astype(np.float32)
    if ids is None or values is None:
        return sampled, None, None
    if int(ids.max()) >= vocabulary + padding.shape[-1]:
        raise CorruptPayloadError(
            f"id {ids.max()} was listed, outside a vocabulary of {vocabulary} and {padding.shape[-1]} padding rows."
        )
    # A stable sort by "is padding" moves padding rows to the end and keeps the others in descending order.
    kept = np.argsort(ids >= vocabulary, axis=-1, kind="stable")[:, :k]
    values = (np.take_along_axis(values, kept, -1) - shift[:, None]).astype(np.float32)
    return sampled, np.take_along_axis(ids, kept, -1), values


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
        vocabulary: V, the ids that count.
        teacher: name for errors.

    Raises:
        NonFiniteError: when a log-prob is NaN, positive beyond rounding, or infinite.
        CorruptPayloadError: when a listed id is outside the vocabulary.
    """
    for array in (sampled, values):
        if array is not None and not (np.isfinite(array).all() and float(array.max(initial=-math.inf)) < 1e-3):
            raise NonFiniteError(
                f"teacher {teacher} returned NaN or a log-prob above zero; check its weights and dtype."
            )
    if ids is None or values is None:
        return Scores(sampled=sampled)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise CorruptPayloadError(
            f"teacher {teacher} listed ids from {ids.min()} to {ids.max()}, outside its vocabulary of {vocabulary}."
        )
    unsigned: U32 = ids.astype(np.uint32)
    tail = log_tail(values, vocabulary)
    # The least finite float16: an id that was listed is not impossible, which -inf would say.
    carried = np.maximum(values, -65504.0).astype(np.float16) if value_dtype == "f16" else values
    return Scores(sampled=sampled, ids=unsigned, values=carried, log_tail=tail)
