"""SGLang's HTTP API for `teacher_server.engines.sglang`: the calls, and their responses as arrays.

The fields are those of SGLang 0.5.23: `managers/io_struct.py` and `managers/tokenizer_manager.py` in its wheel.
"""

import base64
import binascii
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, NonFiniteError
from opd.http import MOST_BYTES
from opd.wire.types import F32, ScoreItem
from teacher_server.engines.remote import ServerClient

_FLUSH_SECONDS = 60.0


class SglangClient(ServerClient):
    """Calls an SGLang server; arguments as `ServerClient`'s."""

    engine = "SGLang"

    def flush(self) -> None:
        """Empty the prefix cache once no row is running, those whose client hung up included.

        Raises:
            UnavailableError: if rows are still running after a while.
        """
        self._send(f"/flush_cache?timeout={_FLUSH_SECONDS:g}", {}, admin=True, most_bytes=MOST_BYTES)  # answers a text


def score_request(item: ScoreItem, k: int, listed: Sequence[int] = ()) -> dict[str, Any]:
    """The body of a /generate request that scores the response of a sequence.

    Args:
        item: the sequence.
        k: number of most likely ids to list at each position; 0 for none.
        listed: further ids whose log-probs are wanted at every position.
    """
    body: dict[str, Any] = {
        "rid": uuid.uuid4().hex,
        "input_ids": item.token_ids.tolist(),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The first entry is null; this makes it the last prompt token, so that the prompt may come from the cache.
        "logprob_start_len": item.prompt_length - 1,
        "stream": False,
    }
    if k:
        body |= {"top_logprobs_num": k}
        body |= {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    if listed:
        body |= {"token_ids_logprob": list(listed)}
    return body


def most_bytes(item: ScoreItem, k: int, listed: Sequence[int] = ()) -> int:
    """Largest response to `score_request` that is read, in bytes: several times what SGLang sends."""
    return 2**20 + len(item.token_ids) * (128 * (1 + len(listed)) + 32 * k)


def token_log_probs(meta: dict[str, Any], expected: list[int], rows: int, url: str) -> F32:
    """[T] log-probs of the response ids, which follow a null entry for the last prompt token.

    Args:
        meta: `meta_info` of the response.
        expected: the T response ids.
        rows: rows of the head; SGLang reports the last one's id as 0.
        url: the server's address, for messages.

    Raises:
        NonFiniteError: if a log-prob is null, which is how SGLang writes NaN.
        CorruptPayloadError: if number, ids or values do not match the request.
    """
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(expected) + 1:
        count = len(entries) if isinstance(entries, list) else None
        raise CorruptPayloadError(f"SGLang at {url} returned {count} input log-probs instead of {len(expected) + 1}.")
    values, ids = _pairs(entries[1:], url)
    if any(token != sent and (token != 0 or sent != rows - 1) for token, sent in zip(ids, expected, strict=True)):
        raise CorruptPayloadError(f"SGLang at {url} returned log-probs of other tokens than it was sent.")
    return np.array(values, np.float32)


def _pairs(entries: Any, url: str) -> tuple[list[float], list[int]]:
    """Log-probs and ids of entries [log-prob, id, ...]; errors as in `token_log_probs`."""
    try:
        values, ids = [entry[0] for entry in entries], [int(entry[1]) for entry in entries]
        if any(value is None for value in values):
            raise NonFiniteError(
                f"SGLang at {url} returned a log-prob that is NaN or infinite; check the weights that it holds."
            )
        return [float(value) for value in values], ids
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptPayloadError(f"SGLang at {url} returned a log-prob that is not a number: {error}.") from error


def listed_log_probs(meta: dict[str, Any], listed: Sequence[int], rows: int, url: str) -> F32:
    """[T, N] log-probs of N listed ids at each of `rows` = T response positions, which follow a null entry.

    Raises:
        NonFiniteError: if a log-prob is null, which is how SGLang writes NaN.
        CorruptPayloadError: if number, ids or values do not match the request.
    """
    entries = meta.get("input_token_ids_logprobs")
    if not isinstance(entries, list) or len(entries) != rows + 1 or entries[0]:
        raise CorruptPayloadError(
            f"SGLang at {url} did not return the log-probs of the {len(listed)} ids that were asked for."
        )
    found = [_pairs(row, url) for row in entries[1:]]
    if any(ids != list(listed) for _, ids in found):
        raise CorruptPayloadError(f"SGLang at {url} returned log-probs of other ids than were asked for.")
    return np.array([values for values, _ in found], np.float32)


def flat_top_k(meta: dict[str, Any], rows: int, k: int, url: str) -> tuple[NDArray[np.int32], F32]:
    """([T, K] ids, [T, K] log-probs), descending, from the flat base64 fields.

    Raises:
        CorruptPayloadError: if shape, dtypes or bytes do not match the request.
    """
    prefix = "input_top_logprobs_"
    shape, skipped = meta.get(prefix + "shape"), meta.get(prefix + "null_prefix")
    kinds = tuple(meta.get(f"{prefix}{name}_flat_b64_dtype", "") for name in ("val", "idx"))
    if shape != [rows, k] or skipped != 1 or kinds != ("float32", "int32"):
        raise CorruptPayloadError(
            f"SGLang at {url} returned top log-probs of shape {shape} after {skipped} empty rows as {kinds} instead of "
            f"{[rows, k]} after 1 as ('float32', 'int32')."
        )
    try:
        raw = [base64.b64decode(meta[f"{prefix}{name}_flat_b64"], validate=True) for name in ("val", "idx")]
        values = np.frombuffer(raw[0], "<f4").reshape(rows, k)
        ids = np.frombuffer(raw[1], "<i4").reshape(rows, k)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise CorruptPayloadError(f"SGLang at {url} returned top log-probs that cannot be decoded: {error}.") from error
    return ids, values.astype(np.float32)
