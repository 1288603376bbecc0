"""A stock vLLM server as an engine, over its HTTP route /inference/v1/generate: log-probs at temperature 1.

The server is `vllm serve MODEL --enable-scale-out`, from 0.32 on. What it cannot do exactly is not announced: hidden
states, other temperatures (ignored for prompt log-probs), gather where it does not score ids of the caller's choice
(`prompt_logprob_token_ids`, for which it needs its V2 model runner; found out by asking it).
"""

import base64
import binascii
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.engine_versions import note_version
from opd.errors import ConfigError, CorruptPayloadError, UnavailableError
from opd.lengths import most_positions
from opd.wire.spans import cut, whole
from opd.wire.types import F32, PayloadKind, ScoreItem, Scores
from teacher_server.engines.base import EngineItem, Exchange
from teacher_server.engines.engine_topk import from_lists, without_padding
from teacher_server.engines.remote import RemoteEngine, ServerClient

_ROUTE = "/inference/v1/generate"
_PROBE = ScoreItem(np.array([1, 2, 3, 4], np.uint32), 2)
_Listed = tuple[F32, NDArray[np.integer] | None, F32 | None]
"""[T] log-probs of the response, [T, k] likeliest ids and their log-probs, descending; None for k = 0."""
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class VllmServerClient(ServerClient):
    """Calls a vLLM server; arguments as `ServerClient`'s."""

    engine = "vLLM"


class VllmServerEngine(RemoteEngine):
    """A stock vLLM server over HTTP: sampled and topk, and gather where it takes ids of the caller's choice.

    Scores through a vLLM server, which must serve the model in `model`. vLLM does not say which weights it holds, so
    another client must not replace them; agreement with other replicas is checked by the fleet.

    Args:
        model: folder (or hub id) with the weights and the tokenizer on which the server was started; identity and
            hashes are computed from it.
        url: address of the server, for example "http://127.0.0.1:8000".
        served_name: the model's name there; the only one by default.
        api_key: sent as a bearer token.
        dtype: what the server computes in ("float32", "bfloat16" or "float16"); by default what vLLM chooses, bfloat16
            for a float32 checkpoint.
        max_k: largest k that is announced; the server's --max-logprobs must be as large.
        concurrency: requests in flight at once; the server batches them.
        timeout: seconds to wait for a response.
        deterministic: must be False.
        revision: revision of a hub id.
        trust_remote_code: run configuration code from the folder or the hub.

    Raises:
        ConfigError: if the model folder cannot be read, an option is not valid here, or the server cannot score this
            model exactly.
        UnavailableError: if the server does not respond.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str,
        served_name: str | None = None,
        api_key: str | None = None,
        dtype: str | None = None,
        max_k: int = 20,
        concurrency: int = 32,
        timeout: float = 600.0,
        deterministic: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            model,
            "vllm_server",
            concurrency=concurrency,
            deterministic=deterministic,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        self._client = VllmServerClient(url, api_key, api_key, timeout)
        self._served = self._served_as(served_name)
        stored = str(getattr(self._config, "dtype", None)).removeprefix("torch.")
        computed = dtype or {"float32": "bfloat16"}.get(stored, stored)
        if computed not in _DTYPES:
            raise ConfigError(f"dtype {computed!r} of the vLLM server is not known; use one of {', '.join(_DTYPES)}.")
        limits = [self._served.get("max_model_len"), most_positions(self._config)]
        version = str(self._client.call("/version").get("version", ""))
        note_version("vLLM", version, f"the server at {url}")
        self._info = self._describe(
            model,
            f"vllm {version or 'unknown'}",
            frozenset({PayloadKind.SAMPLED, PayloadKind.TOPK}),
            _DTYPES[computed],
            # vLLM must be able to generate a token, which nothing here reads.
            min(int(limit) for limit in limits if limit) - 1 if any(limits) else 1 << 20,
            max_k,
        )
        listed, size = self._largest_k(), self._info.vocab_size
        if self._can_gather(listed, 2):
            self._info = replace(self._info, payloads=self._info.payloads | {PayloadKind.GATHER})
        elif self._info.padding_rows:
            raise ConfigError(
                f"the head of {model} has {self._info.padding_rows} rows that belong to no token, over which vLLM "
                "normalises too, and this server does not score chosen ids, by which their share could be removed; "
                "start vLLM with its V2 model runner, or on a copy of the model without those rows."
            )
        self._padding = np.arange(size, size + self._info.padding_rows)
        if len(self._padding) and not self._can_gather(listed, 0, self._padding.tolist()):
            self._padding = self._padding[:0]  # it knows no such ids, so it normalises without them

    def prepare_weights(self, folder: Any) -> Exchange:
        """Not possible; always raises `ConfigError`."""
        raise ConfigError(
            f"vLLM at {self._client.url} does not load weights on request; restart it, or use the vllm engine."
        )

    def sleep(self) -> None:
        """Not possible; always raises `ConfigError`."""
        raise ConfigError(f"vLLM at {self._client.url} keeps its weights on the device; stop it to free the memory.")

    def wake(self) -> None:
        """Nothing to do, since it never sleeps."""

    def _score_one(self, entry: EngineItem) -> Scores:
        item, spec, size = whole(entry.item), entry.spec, self._info.vocab_size
        ids: NDArray[np.integer] | None = None
        values: F32 | None = None
        if spec.kind is PayloadKind.GATHER:
            ids = item.gather_ids
            sampled, values, beyond = self._chosen(item, ids, self._padding)
        else:
            if len(self._padding):
                sampled, _, beyond = self._chosen(item, None, self._padding)
            if spec.k or not len(self._padding):
                sampled, ids, values = self._most_likely(item, spec.k)
        if len(self._padding):
            sampled, ids, values = without_padding(sampled, ids, values, beyond, vocabulary=size, k=spec.k)
        scores = from_lists(
            sampled, ids, values, value_dtype=spec.value_dtype, vocabulary=size, teacher=self._info.model
        )
        return cut(scores, entry.item)

    def _most_likely(self, item: ScoreItem, k: int) -> _Listed:
        """As `_listed`, with at least `k` ids at each position that are not padding rows."""
        asked = k
        while True:
            sampled, ids, values = self._listed(item, asked)
            missing = 0 if ids is None else k - int((ids < self._info.vocab_size).sum(-1).min())
            if missing <= 0:
                return sampled, ids, values
            asked += missing

    def _listed(self, item: ScoreItem, k: int) -> _Listed:
        """The response tokens, and the k likeliest ids at each position, as the server lists them."""
        answer = self._ask(item, {"prompt_logprobs": k}, 160 * (k + 1))
        entries = answer.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(item.token_ids):
            raise self._corrupt(f"{len(item.token_ids)} lists of prompt log-probs")
        sampled = np.empty(item.response_length, np.float32)
        ids = np.empty((item.response_length, k), np.int64)
        values = np.empty((item.response_length, k), np.float32)
        try:
            for row, (token, listed) in enumerate(
                zip(item.response_ids.tolist(), entries[item.prompt_length :], strict=True)
            ):
                sampled[row] = listed[str(token)]["logprob"]
                likeliest = sorted((each["rank"], int(name), each["logprob"]) for name, each in listed.items())[:k]
                ids[row], values[row] = [each[1] for each in likeliest], [each[2] for each in likeliest]
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise self._corrupt(f"the response token and {k} likeliest ids at every position") from error
        return (sampled, ids, values) if k else (sampled, None, None)

    def _chosen(
        self, item: ScoreItem, chosen: NDArray[np.integer] | None, padding: NDArray[np.integer]
    ) -> tuple[F32, F32, F32]:
        """([T] log-probs of the response, [T, K] of the chosen ids, [T, P] of the padding rows)."""
        own = item.response_ids.astype(np.int64)[:, None]
        asked = np.empty((len(own), 0), np.int64) if chosen is None else chosen.astype(np.int64)
        same = asked == own  # no id twice: the response token's own column stays empty where it was chosen anyway
        alone = np.where(same.any(-1, keepdims=True), -1, own)
        table = np.concatenate([asked, alone, np.broadcast_to(padding, (len(own), len(padding)))], 1)
        body = {"prompt_logprob_token_ids": table.tolist(), "prompt_logprob_start": item.prompt_length - 1}
        answer = self._ask(item, body, 8 * table.shape[1])
        try:
            raw = base64.b64decode(answer["prompt_token_id_logprobs"], validate=True)
            found = np.load(io.BytesIO(raw), allow_pickle=False)
        except (LookupError, TypeError, ValueError, EOFError, OSError, binascii.Error) as error:
            raise self._corrupt("an array of log-probs") from error
        if found.shape != table.shape or found.dtype.kind != "f":
            raise self._corrupt(f"log-probs of shape {table.shape}")
        values = found.astype(np.float32)
        k = asked.shape[1]
        sampled = np.where(same.any(-1), np.where(same, values[:, :k], 0.0).sum(-1), values[:, k])
        return sampled.astype(np.float32), values[:, :k], values[:, k + 1 :]

    def _ask(self, item: ScoreItem, options: dict[str, Any], bytes_a_token: int) -> dict[str, Any]:
        # A generated token is read by nothing; detokenisation would cost more than the forward pass.
        params = {"max_tokens": 1, "temperature": 1.0, "detokenize": False, **options}
        body = {"model": self._served["id"], "token_ids": item.token_ids.tolist(), "sampling_params": params}
        most = 2**20 + len(item.token_ids) * (128 + bytes_a_token)
        return self._client.call(_ROUTE, body, most_bytes=most)

    def _served_as(self, name: str | None) -> dict[str, Any]:
        """What /v1/models says of the model to use."""
        listed = self._client.call("/v1/models").get("data")
        models = {str(each["id"]): each for each in listed or () if isinstance(each, dict) and "id" in each}
        if name is None and len(models) == 1:
            return next(iter(models.values()))
        if name not in models:
            names = ", ".join(sorted(models)) or "none"
            raise ConfigError(
                f"vLLM at {self._client.url} serves the models {names}; name one with --engine-option served_name=NAME."
            )
        return models[name]

    def _largest_k(self) -> _Listed:
        """What the server lists at the positions of a probe, asked for as many ids as are announced.

        Raises:
            ConfigError: if it does not list as many.
        """
        try:
            return self._listed(_PROBE, self._info.max_k)
        except UnavailableError as error:
            raise ConfigError(
                f"vLLM at {self._client.url} did not list {self._info.max_k} ids at each position ({error}); start it "
                "with --enable-scale-out and --max-logprobs, or lower --engine-option max_k."
            ) from error

    def _can_gather(self, listed: _Listed, k: int, others: Sequence[int] = ()) -> bool:
        """Whether the server scores `k` ids of its own list as it has listed them, and `others` beside them."""
        sampled, ids, values = listed
        assert ids is not None and values is not None
        try:
            own, chosen, _ = self._chosen(_PROBE, ids[:, :k], np.asarray(others, np.int64))
        except (UnavailableError, CorruptPayloadError):  # refused, or ignored
            return False
        return bool(np.allclose(own, sampled, atol=0.05) and np.allclose(chosen, values[:, :k], atol=0.05))

    def _corrupt(self, wanted: str) -> CorruptPayloadError:
        return CorruptPayloadError(f"vLLM at {self._client.url} did not return {wanted}; check its version.")
