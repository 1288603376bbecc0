"""An SGLang server as an engine, over its HTTP API: sampled and top-k log-probs of given ids, at temperature 1.

What SGLang cannot do exactly is not announced: gather (its `token_ids_logprob` is one list for all positions), hidden
states (on a prefix-cache hit only the uncached suffix is returned), other temperatures (ignored for input log-probs).
SGLang normalises over the padded head, so the log-probs of the padding rows are requested too, and their mass is
removed.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.engine_versions import note_version
from opd.errors import ConfigError, CorruptPayloadError, IncompatibleTeacherError, OpdError, UnavailableError
from opd.lengths import most_positions
from opd.pretrained import read_config
from opd.wire.fingerprint import weights_hash
from opd.wire.spans import cut
from opd.wire.types import F32, PayloadKind, ScoreItem, Scores
from teacher_server.engines.base import EngineItem, Exchange, require_awake
from teacher_server.engines.checkpoint import check_same_tensors, check_unchanged, read_header
from teacher_server.engines.engine_topk import from_lists, without_padding
from teacher_server.engines.loading import (
    check_same_architecture,
)
from teacher_server.engines.remote import RemoteEngine
from teacher_server.engines.sglang_http import (
    SglangClient,
    flat_top_k,
    listed_log_probs,
    most_bytes,
    score_request,
    token_log_probs,
)

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float": "f32", "half": "f16"}

_UNKNOWN = object()
"""In the place of a version: the server holds weights that are not known."""


class SglangEngine(RemoteEngine):
    """An SGLang server over its HTTP API: sampled and topk.

    Scores through an SGLang server, which must serve the model in `model`.

    Args:
        model: folder (or hub id) with the weights and the tokenizer on which the server was started; identity and
            hashes are computed from it.
        url: address of the server, for example "http://127.0.0.1:30000".
        api_key: sent as a bearer token.
        admin_api_key: sent instead for replacing weights and sleeping; `api_key` by default.
        max_k: largest k that is announced.
        concurrency: requests in flight at once; the server batches them.
        timeout: seconds to wait for a response.
        deterministic: must be False.
        revision: revision of a hub id.
        trust_remote_code: run configuration code from the folder or the hub.

    Raises:
        ConfigError: if the model folder cannot be read or an option is not valid here.
        UnavailableError: if the server does not respond.
        IncompatibleTeacherError: if the server serves another kind of model.
    """

    def __init__(
        self,
        model: str,
        *,
        url: str,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        max_k: int = 256,
        concurrency: int = 32,
        timeout: float = 600.0,
        deterministic: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            model,
            "sglang",
            concurrency=concurrency,
            deterministic=deterministic,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        self._client = SglangClient(url, api_key, admin_api_key or api_key, timeout)
        served, server = self._client.call("/model_info"), self._client.call("/server_info")
        self._check_model(served)
        version = str(server.get("version", ""))
        note_version("SGLang", version, f"the server at {url}")
        # Compared with every response, see `_ask`: other clients of the server may replace its weights.
        self._version: object = served.get("weight_version")
        self._saves_memory = bool(server.get("enable_memory_saver"))
        self._info = self._describe(
            model,
            f"sglang {version or 'unknown'}",
            frozenset({PayloadKind.SAMPLED, PayloadKind.TOPK}),
            self._dtype(str(server.get("dtype", "auto"))),
            # SGLang refuses an input of exactly its limit.
            int(server.get("max_req_input_len") or most_positions(self._config) or 1 << 20) - 1,
            max_k,
        )

    def prepare_weights(self, folder: Path) -> Exchange:
        """Check names, shapes and config of new weights; the exchange makes the server load them from their folder.

        The server must be able to read the folder at the same path, and the old folder too if the old weights are to be
        restored.

        Raises:
            ConfigError: if the folder cannot be read; from the exchange, if the server refuses the weights, with the
                old ones loaded again.
            IncompatibleTeacherError: if config, names or shapes differ.
        """
        folder = Path(folder).resolve()
        if (folder / "config.json").is_file():
            check_same_architecture(self._config, read_config(folder, trust_remote_code=self._trust), folder)
        check_same_tensors(read_header(self._folder), read_header(folder), folder)
        other, other_hash, known = folder, weights_hash(folder), True

        def exchange() -> None:
            nonlocal other, other_hash, known
            with self._lock:
                require_awake(self._info.model, asleep=self._asleep, closed=self._closed)
                # The hash was taken above for the first exchange; before a later one the folder may have changed.
                if not known:
                    check_unchanged(other, other_hash)
                old, old_hash, known = self._folder, self._info.weights_hash, False
                try:
                    self._load(other, other_hash)
                except OpdError:
                    check_unchanged(old, old_hash)
                    self._load(old, old_hash)
                    raise
                other, other_hash = old, old_hash

        return exchange

    def sleep(self) -> None:
        """Release the server's GPU memory.

        Raises:
            ConfigError: if the server was started without --enable-memory-saver, and would release nothing.
            UnavailableError: if it cannot be reached, or rows of other clients do not end.
        """
        with self._lock:
            if not self._asleep and not self._closed:
                if not self._saves_memory:
                    raise ConfigError(
                        f"SGLang at {self._client.url} cannot release its memory; start it with --enable-memory-saver."
                    )
                self._client.flush()  # a server with rows under way would end at the release
                self._client.call("/release_memory_occupation", {}, admin=True)
            self._asleep = True

    def wake(self) -> None:
        """Take the GPU memory back and load the weights again, since they do not survive the release."""
        with self._lock:
            if self._asleep and not self._closed:
                self._client.call("/resume_memory_occupation", {}, admin=True)
                self._load(self._folder, self._info.weights_hash)
            self._asleep = False

    def _score_one(self, entry: EngineItem) -> Scores:
        item, spec, url = entry.item, entry.spec, self._client.url
        size = self._info.vocab_size
        padding = range(size, size + self._info.padding_rows)
        meta = self._ask(item, spec.k, padding)
        ids: NDArray[np.integer] | None = None
        values: F32 | None = None
        if spec.k:
            ids, values = flat_top_k(meta, item.response_length, spec.k, url)
        if ids is not None and int((ids < size).sum(-1).min()) < spec.k:
            # Padding rows took places in the top k: ask for as many more ids as there are padding rows, so that k
            # remain.
            meta = self._ask(item, spec.k + len(padding), padding)
            ids, values = flat_top_k(meta, item.response_length, spec.k + len(padding), url)
        sampled = token_log_probs(meta, item.response_ids.tolist(), size + len(padding), url)
        if padding:
            beyond = listed_log_probs(meta, padding, item.response_length, url)
            sampled, ids, values = without_padding(sampled, ids, values, beyond, vocabulary=size, k=spec.k)
        scores = from_lists(
            sampled,
            ids,
            values,
            value_dtype=spec.value_dtype,
            vocabulary=size,
            teacher=self._info.model,
        )
        return cut(scores, item)  # SGLang scores every position

    def _ask(self, item: ScoreItem, k: int, padding: range) -> dict[str, Any]:
        """The `meta_info` of a response, checked to come from the weights in use."""
        request, most = score_request(item, k, padding), most_bytes(item, k, padding)
        meta = self._client.call("/generate", request, most_bytes=most).get("meta_info")
        if not isinstance(meta, dict):
            raise CorruptPayloadError(
                f"SGLang at {self._client.url} sent a reply without meta_info; check its version."
            )
        if self._version is _UNKNOWN:
            raise UnavailableError(
                f"SGLang at {self._client.url} holds weights that are not known since a load failed; load the teacher "
                "again."
            )
        if meta.get("weight_version") != self._version:
            raise UnavailableError(
                f"SGLang at {self._client.url} now has weights of version {meta.get('weight_version')!r}, not "
                f"{self._version!r}: another client replaced them; load the teacher again."
            )
        return meta

    def _load(self, folder: Path, new_hash: str) -> None:
        """Have the server load weights, after which it holds these.

        Raises:
            ConfigError: if it did not; it may now hold some or all of them under any version, so nothing is scored
                until a load succeeds.
        """
        self._version = _UNKNOWN
        body = {"model_path": str(folder.resolve()), "weight_version": new_hash, "flush_cache": True}
        try:
            try:
                answer = self._client.call("/update_weights_from_disk", body, admin=True)
            except UnavailableError as error:
                if "flush" not in str(error):
                    raise
                self._client.flush()
                answer = self._client.call("/update_weights_from_disk", body, admin=True)
        except UnavailableError as error:
            raise ConfigError(f"the SGLang server did not take the weights in {folder}: {error}") from error
        if not answer.get("success"):
            raise ConfigError(f"the SGLang server did not take the weights in {folder}: {answer.get('message')}.")
        self._folder, self._version = folder, new_hash
        self._info = replace(self._info, weights_hash=new_hash)

    def _check_model(self, served: dict[str, Any]) -> None:
        theirs, ours = served.get("model_type"), getattr(self._config, "model_type", None)
        if theirs is not None and theirs != ours:
            raise IncompatibleTeacherError(
                f"SGLang at {self._client.url} serves a model of type {theirs}, but {self._folder} is of type {ours}; "
                "start it with that folder."
            )
        if served.get("is_generation") is False:
            raise IncompatibleTeacherError(
                f"SGLang at {self._client.url} does not serve a generative model; start it with one."
            )

    def _dtype(self, name: str) -> str:
        stored = str(getattr(self._config, "dtype", None)).removeprefix("torch.")
        # With dtype "auto", SGLang computes f32 checkpoints in f16.
        return _DTYPES.get(name) or {"float32": "f16"}.get(stored) or _DTYPES.get(stored, "bf16")
