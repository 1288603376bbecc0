"""What engines have in common whose model runs on another server, reached over HTTP."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from opd.errors import ConfigError, CorruptPayloadError, UnavailableError, one_line
from opd.http import MOST_BYTES, Connection, NoReplyError, Reply
from opd.pretrained import read_config
from opd.wire.fingerprint import weights_hash
from opd.wire.types import Head, PayloadKind, Scores
from teacher_server.engines.base import EngineInfo, EngineItem, check_batch, require_awake
from teacher_server.engines.loading import counted_ids, load_stop_token_ids, load_tokenizer_identity, resolve_folder


class ServerClient:
    """Calls a server.

    Args:
        url: its address.
        api_key: bearer token of ordinary calls, or None.
        admin_key: bearer token of calls that change the server, or None.
        timeout: seconds that a call may take.

    Raises:
        ConfigError: if the address is not an HTTP address.
    """

    engine: ClassVar[str]
    """Its name in messages."""

    def __init__(self, url: str, api_key: str | None, admin_key: str | None, timeout: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url {url!r} of the {self.engine} server must start with http:// or https://.")
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
        reply = self._send(path, body, admin=admin, most_bytes=most_bytes)
        try:
            found = reply.json() if reply.raw.strip() else {}
        except ValueError as error:
            raise CorruptPayloadError(
                f"{self.engine} at {self.url}{path} sent a reply that is not JSON ({one_line(error)}); check that the "
                "address is that of such a server."
            ) from error
        return found if isinstance(found, dict) else {}

    def _send(self, path: str, body: dict[str, Any] | None, *, admin: bool, most_bytes: int) -> Reply:
        key = self._admin_key if admin else self._api_key
        try:
            with Connection(self.url, seconds=self._timeout, key=key, proxied=True) as connection:
                reply = connection.send(path, body, most_bytes=most_bytes)
        except NoReplyError as error:
            raise UnavailableError(f"{self.engine} at {self.url} cannot be reached: {error}; is it running?") from error
        if not reply.ok:
            raise UnavailableError(
                f"{self.engine} at {self.url}{path} responded with status {reply.status}: {reply.quoted()}"
            )
        return reply


class RemoteEngine(ABC):
    """An engine whose rows are scored by a server, one call each, up to `concurrency` at once.

    Args:
        model: folder (or hub id) with the weights and the tokenizer on which the server was started; identity and
            hashes are computed from it.
        engine: name of the server, for messages.
        concurrency: calls in flight at once; the server batches them.
        deterministic: must be False.
        revision: revision of a hub id.
        trust_remote_code: run configuration code from the folder or the hub.

    Raises:
        ConfigError: if the model folder cannot be read or an option is not valid here.
    """

    _info: EngineInfo

    def __init__(
        self,
        model: str,
        engine: str,
        *,
        concurrency: int,
        deterministic: bool,
        revision: str | None,
        trust_remote_code: bool,
    ) -> None:
        if deterministic:
            raise ConfigError(f"the {engine} engine has no deterministic mode; use the transformers engine for it.")
        self._trust = trust_remote_code
        self._lock = threading.RLock()
        self._asleep = self._closed = False
        self._folder = resolve_folder(model, revision, with_code=trust_remote_code)
        self._config = read_config(self._folder, trust_remote_code=trust_remote_code)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix=f"opd-{engine}")

    def _describe(
        self, model: str, engine: str, payloads: frozenset[PayloadKind], dtype: str, longest: int, max_k: int
    ) -> EngineInfo:
        """The identity that folder and config give, with what the server can do."""
        rows = int(self._config.get_text_config().vocab_size)
        tokenizer = load_tokenizer_identity(self._folder, trust_remote_code=self._trust)
        vocabulary = counted_ids(tokenizer, rows)
        return EngineInfo(
            engine=engine,
            model=model,
            weights_hash=weights_hash(self._folder),
            compute_dtype=dtype,
            vocab_size=vocabulary,
            tokenizer=tokenizer,
            head=None,
            payloads=payloads,
            supports_temperature=False,
            max_sequence_tokens=longest,
            max_k=min(max_k, vocabulary),
            padding_rows=rows - vocabulary,
            stop_token_ids=load_stop_token_ids(self._folder, self._config, tokenizer, vocabulary),
            spans=True,
        )

    @property
    def info(self) -> EngineInfo:
        """Identity and abilities; changes when weights are replaced."""
        return self._info

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Score a batch: one result per item, in order; None for an item that was cancelled.

        Cancellation is polled before a sequence is sent. Every id is checked first, because an id out of range may end
        the server instead of failing the request.

        Raises:
            InvalidRequestError: if an item exceeds a limit of `info`.
            NonFiniteError: if the server returned NaN or infinity.
            UnavailableError: if the server cannot be reached, refuses, or was given other weights by another client.
            CorruptPayloadError: if a response does not match its request.
        """
        check_batch(self._info, batch)
        with self._lock:
            require_awake(self._info.model, asleep=self._asleep, closed=self._closed)
            futures = [self._pool.submit(self._score_unless_cancelled, entry) for entry in batch]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:  # after an error, the rest need not be sent
                    future.cancel()

    def _score_unless_cancelled(self, entry: EngineItem) -> Scores | None:
        if entry.cancelled():
            return None
        return replace(self._score_one(entry), weights_hash=self._info.weights_hash)

    @abstractmethod
    def _score_one(self, entry: EngineItem) -> Scores:
        """The scores of one sequence, without the hash of the weights."""

    def head(self) -> Head:
        """Not served; always raises `UnavailableError`."""
        raise UnavailableError(f"teacher {self._info.model} serves no hidden states; use another engine for them.")

    def memory_bytes(self) -> int:
        """Bytes of the weights' files; the server does not tell how much memory it uses."""
        return sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))

    def close(self) -> None:
        """Stop using the server, which keeps running."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
