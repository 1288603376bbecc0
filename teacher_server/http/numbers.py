"""Scores as JSON: log-probs in as many digits as float32 has, never NaN or an infinity; arrays as .npy in base64."""

import base64
import io
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.wire.types import F32, U32, Scores

BLOCK_ROWS = 256
LOWEST = np.float32(-9999.0)
"""What stands for a log-prob of minus infinity, as in vLLM's answers; JSON has no infinity."""


def finite(values: F32 | NDArray[np.float16]) -> F32:
    """Log-probs that JSON can carry."""
    return np.maximum(values.astype(np.float32, copy=False), LOWEST)


def npy(array: NDArray[Any]) -> str:
    """An array as the bytes of a .npy file in base64."""
    out = io.BytesIO()
    np.save(out, array)
    return base64.b64encode(out.getbuffer()).decode()


def npy_bytes(rows: int, columns: int) -> int:
    """Most bytes of a float32 array of this shape in the form of `npy`."""
    return 4 * (4 * rows * columns + 256) // 3


def blocks(rows: int) -> Iterator[slice]:
    """Rows a few at a time: as Python's numbers they take ten times the memory that arrays do."""
    yield from (slice(first, first + BLOCK_ROWS) for first in range(0, rows, BLOCK_ROWS))


def own_and_top(scores: Scores, own: U32, part: slice) -> Iterator[tuple[list[int], list[float], list[int]]]:
    """For each position the token's own id first, then the most likely others: ids, log-probs and ranks.

    Args:
        scores: of payload sampled or topk, with ranks where the engine gives them.
        own: [N] the tokens themselves.
        part: the positions.
    """
    if scores.sampled is None:
        raise ValueError("scores of payload sampled or topk hold the log-prob of each token.")
    width = 0 if scores.ids is None else scores.ids.shape[1]
    own = own[part]
    own_values, own_ids = finite(scores.sampled[part]).tolist(), own.tolist()
    # Without ranks from the engine, all that is known of a token outside the list is that it is not in it.
    ranks = [width + 1] * len(own_ids) if scores.ranks is None else scores.ranks[part].tolist()
    if scores.ids is None or scores.values is None:
        for id_, value, rank in zip(own_ids, own_values, ranks, strict=True):
            yield [id_], [value], [rank]
        return
    listed = scores.ids[part] == own[:, None]
    where = np.where(listed.any(1), listed.argmax(1), width).tolist()
    tops = scores.ids[part].tolist(), finite(scores.values[part]).tolist()
    for id_, value, rank, at, ids, values in zip(own_ids, own_values, ranks, where, *tops, strict=True):
        if at < width:
            yield [id_, *ids[:at], *ids[at + 1 :]], [value, *values[:at], *values[at + 1 :]], _ranks(width, at)
        else:
            yield [id_, *ids], [value, *values], [max(rank, width + 1), *range(1, width + 1)]


@lru_cache(maxsize=4096)
def _ranks(width: int, at: int) -> list[int]:
    """Ranks of a list of `width` whose entry `at` has been moved to the front."""
    return [at + 1, *(rank for rank in range(1, width + 1) if rank != at + 1)]


@lru_cache(maxsize=64)
def joined(form: str, count: int) -> str:
    """`count` forms for the operator %, with commas between them."""
    return ",".join([form] * count)
