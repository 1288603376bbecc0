"""SGLang's HTTP API for `teacher_server.engines.sglang`: the calls, and their responses as arrays.

The fields are those of SGLang 0.5.23: `managers/io_struct.py` and `managers/tokenizer_manager.py` in its wheel.
"""

import base64
import binascii
import http.client
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import CorruptPayloadError, UnavailableError
from opd.wire.types import F32, ScoreItem


class SglangClient:
    """Calls an SGLang server.

    Args:
        url: its address.
        api_key: bearer token of ordinary calls, or None.
        admin_key: bearer token of calls that change the server, or None.
        timeout: seconds to wait for a response.
    """

    def __init__(self, url: str, api_key: str | None, admin_key: str | None, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._api_key, self._admin_key, self._timeout = api_key, admin_key, timeout

    def call(self, path: str, body: dict[str, Any] | None = None, *, admin: bool = False) -> dict[str, Any]:
        """Send GET (without a body) or POST a JSON object; returns {} if the response is empty or not an object.

        Raises:
            UnavailableError: if the server cannot be reached or responds with an error.
            CorruptPayloadError: if the response is not JSON.
        """
        headers = {"Content-Type": "application/json"}
        key = self._admin_key if admin else self._api_key
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        data = None if body is None else json.dumps(body).encode()
        try:
            # Inside the `try`, because a malformed address raises ValueError.
            request = urllib.request.Request(self.url + path, data=data, headers=headers)
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                raw = answer.read()
        # Caught first, because it is an OSError too: the server was reached and gave a reason.
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read(500).decode(errors="replace").split())
            raise UnavailableError(
                f"SGLang at {self.url}{path} responded with status {error.code}: {reason}"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"SGLang at {self.url} cannot be reached: {reason}; is it running?") from error
        try:
            found = json.loads(raw) if raw.strip() else {}
        except ValueError as error:
            raise CorruptPayloadError(
                f"SGLang at {self.url}{path} sent a reply that is not JSON; check that the address is an SGLang "
                "server's."
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
    except (TypeError, ValueError, IndexError) as error:
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
    except (TypeError, ValueError, IndexError) as error:
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
