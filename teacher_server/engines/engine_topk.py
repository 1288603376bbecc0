"""`Scores` from an engine's own top-k lists, validated, with as good a tail as such lists allow.

vLLM and SGLang return the log-probs of the response token and of the k most likely ids, normalised over the vocabulary;
the other logits stay in the engine. The tail is therefore 1 minus the listed mass, in float64. Its error is that of the
listed float32 log-probs, about 1e-7 x K in probability, so a smaller tail is reported as `SMALLEST_TAIL`, never as
less.
"""

import math

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, NonFiniteError
from opd.wire.types import F32, U32, Scores

# The spacing of float32 just below 1: the smallest mass that a sum of float32 probabilities can tell from none.
SMALLEST_TAIL = 2.0**-24


def log_tail(values: F32, vocabulary: int) -> F32:
    """[T] log mass outside the listed log-probs [T, K]; -inf only if K is the whole vocabulary."""
    if values.shape[-1] >= vocabulary:
        return np.full(values.shape[0], -np.inf, np.float32)
    # In float64, because the tail is 1 minus a sum that is nearly 1.
    listed = np.exp(values.astype(np.float64)).sum(-1)
    tail: F32 = np.log(np.maximum(1.0 - listed, SMALLEST_TAIL)).astype(np.float32)
    return tail


def without_padding(
    sampled: F32, ids: NDArray[np.integer] | None, values: F32 | None, padding: F32, *, vocabulary: int, k: int
) -> tuple[F32, NDArray[np.integer] | None, F32 | None]:
    """Renormalise log-probs that were normalised over a padded head, over the ids that count.

    log p(i | i counts) = log p(i) - log(1 - mass of the padding rows), in float64. It is exact except for the rounding
    of the given float32 log-probs, about 1e-7 divided by the mass that is left.

    Args:
        sampled: [T] log-probs of the response tokens.
        ids: [T, L] listed ids, at each position at least `k` of them below `vocabulary`; or None.
        values: [T, L] their log-probs, descending; or None.
        padding: [T, P] log-probs of all padding rows.
        vocabulary: V, the number of ids that count; padding rows have the ids V to V + P - 1.
        k: number of ids to keep at each position.

    Returns:
        `sampled`, `ids` and `values` for the ids that count: [T], [T, k], [T, k].

    Raises:
        CorruptPayloadError: if a listed id is beyond the padding rows.
        NonFiniteError: if the padding rows have all the mass.
    """
    # In float64: what the padding rows leave is nearly 1, and in float32 its logarithm would be mostly rounding error.
    left = 1.0 - np.exp(padding.astype(np.float64)).sum(-1)
    if not (left > 0).all():
        raise NonFiniteError(
            "the padding rows of the output head, to which no token belongs, take all the probability; check that the "
            "tokenizer is the model's own."
        )
    shift = np.log(left)
    sampled = (sampled - shift).astype(np.float32)
    if ids is None or values is None:
        return sampled, None, None
    if int(ids.max()) >= vocabulary + padding.shape[-1]:
        raise CorruptPayloadError(
            f"the engine listed id {ids.max()}, beyond the {vocabulary} ids and {padding.shape[-1]} padding rows of "
            "the head."
        )
    # A stable sort by "is padding" moves padding rows to the end and leaves the others in descending order.
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
    """`Scores` of one sequence from listed log-probs.

    Args:
        sampled: [T] log-probs of the response tokens.
        ids: [T, K] listed ids; None for payload sampled.
        values: [T, K] their log-probs.
        value_dtype: "f16" for float16 values; anything else for float32.
        vocabulary: V, the number of ids that count.
        teacher: its name, for errors.

    Raises:
        NonFiniteError: if a log-prob is NaN, infinite, or positive beyond rounding.
        CorruptPayloadError: if a listed id is outside the vocabulary.
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
            f"teacher {teacher} listed ids from {ids.min()} to {ids.max()}, but it has the ids 0 to {vocabulary - 1}."
        )
    unsigned: U32 = ids.astype(np.uint32)
    tail = log_tail(values, vocabulary)
    # Clamped to the lowest finite float16: -inf would say that an id which was listed is impossible.
    carried = np.maximum(values, -65504.0).astype(np.float16) if value_dtype == "f16" else values
    return Scores(sampled=sampled, ids=unsigned, values=carried, log_tail=tail)
