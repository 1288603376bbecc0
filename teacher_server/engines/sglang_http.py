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

from opd.errors import CorruptPayloadError, UnavailableError, one_line
from opd.http import MOST_BYTES, Connection, NoReplyError
from opd.wire.types import F32, ScoreItem


class SglangClient:
    """Calls an SGLang server.

    Args:
        url: its address.
        api_key: bearer token of ordinary calls, or None.
        admin_key: bearer token of calls that change the server, or None.
        timeout: seconds that a call may take.
    """

    def __init__(self, url: str, api_key: str | None, admin_key: str | None, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._api_key, self._admin_key, self._timeout = api_key, admin_key, timeout

    def call(
        self, path: str, body: dict[str, Any] | None = None, *, admin: bool = False, most_bytes: int = MOST_BYTES
    ) -> dict[str, Any]:
        """Send GET (without a body) or POST a JSON object; returns {} if the response is empty or not an object.

        Raises:
            UnavailableError: if no response of at most `most_bytes` arrives in time, or it is an error or a redirect.
            CorruptPayloadError: if the response is not JSON.
        """
        key = self._admin_key if admin else self._api_key
        try:
            with Connection(self.url, seconds=self._timeout, key=key, proxied=True) as connection:
                reply = connection.send(path, body, most_bytes=most_bytes)
        except NoReplyError as error:
            raise UnavailableError(f"SGLang at {self.url} cannot be reached: {error}; is it running?") from error
        if not reply.ok:
            raise UnavailableError(f"SGLang at {self.url}{path} responded with status {reply.status}: {reply.quoted()}")
        try:
            found = reply.json() if reply.raw.strip() else {}
        except ValueError as error:
            raise CorruptPayloadError(
                f"SGLang at {self.url}{path} sent a reply that is not JSON ({one_line(error)}); check that the address "
                "is an SGLang server's."
            ) from error
        return found if isinstance(found, dict) else {}


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


def token_log_probs(meta: dict[str, Any], expected: list[int], url: str) -> F32:
    """[T] log-probs of the response ids, which follow a null entry for the last prompt token.

    Raises:
        CorruptPayloadError: if number, ids or values do not match the request.
    """
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(expected) + 1:
        count = len(entries) if isinstance(entries, list) else None
        raise CorruptPayloadError(f"SGLang at {url} returned {count} input log-probs instead of {len(expected) + 1}.")
    try:
        pairs = [(float(entry[0]), int(entry[1])) for entry in entries[1:]]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptPayloadError(
            f"SGLang at {url} returned an input log-prob that is not a number: {error}."
        ) from error
    if [token for _, token in pairs] != expected:
        raise CorruptPayloadError(f"SGLang at {url} returned log-probs of other tokens than it was sent.")
    return np.array([value for value, _ in pairs], np.float32)


def listed_log_probs(meta: dict[str, Any], listed: Sequence[int], rows: int, url: str) -> F32:
    """[T, N] log-probs of N listed ids at each of `rows` = T response positions, which follow a null entry.

    Raises:
        CorruptPayloadError: if number, ids or values do not match the request.
    """
    entries = meta.get("input_token_ids_logprobs")
    if not isinstance(entries, list) or len(entries) != rows + 1 or entries[0]:
        raise CorruptPayloadError(
            f"SGLang at {url} did not return the log-probs of the {len(listed)} ids that were asked for."
        )
    try:
        values = [[float(entry[0]) for entry in row] for row in entries[1:]]
        fits = all([int(entry[1]) for entry in row] == list(listed) for row in entries[1:])
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise CorruptPayloadError(
            f"SGLang at {url} returned a log-prob of a listed id that is not a number: {error}."
        ) from error
    if not fits:
        raise CorruptPayloadError(f"SGLang at {url} returned log-probs of other ids than were asked for.")
    return np.array(values, np.float32)


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
