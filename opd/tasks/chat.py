"""A client of OpenAI-compatible chat endpoints, for judges; vLLM, SGLang and most services have such an endpoint.

    client = ChatClient(ChatSettings(endpoint="http://host:8000/v1", model="judge"))
    text = client.ask([{"role": "user", "content": "..."}])

Answers are cached in memory and, with `cache`, in a folder, by a hash of everything that decides them, so that a step
that is taken again, or a run that is resumed, gets the same answers. A call that fails or takes too long raises
`ChatFailed` after `attempts` and is never cached; whatever was asked about is then unknown. If the folder cannot be
written, the run continues without it. The key is read from an environment variable and appears in no recipe, hash or
message.
"""

import contextlib
import hashlib
import http.client
import json
import logging
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from opd.config import Settings

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.5
_MOST_BYTES = 4_000_000


class ChatFailed(Exception):
    """A call got no answer, which says nothing about what was asked."""


class CallFailed(Exception):
    """One attempt got no answer.

    Attributes:
        again: whether another attempt may succeed.
    """

    def __init__(self, reason: str, *, again: bool) -> None:
        super().__init__(reason)
        self.again = again


class ServiceSettings(Settings):
    """How a service is called, over any protocol."""

    timeout: float = Field(30.0, gt=0, description="Seconds that one call to the service may take.")
    attempts: int = Field(
        2, ge=1, description="Maximum calls for one question; if none gets an answer, the result is unknown."
    )
    cache: Path | None = Field(
        None,
        description="Folder that keeps the service's answers for later runs; null keeps them in memory for this run "
        "only.",
    )


class EndpointSettings(ServiceSettings):
    """How an HTTP service is called."""

    endpoint: str = Field(description="Address of the service, for example http://127.0.0.1:8000/v1.")
    key_variable: str = Field(
        "", description="Environment variable that holds the API key of the service; empty means no key."
    )

    @field_validator("endpoint")
    @classmethod
    def _http(cls, endpoint: str) -> str:
        if not endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {endpoint!r} does not start with http:// or https://")
        return endpoint.rstrip("/")


class ChatSettings(EndpointSettings):
    """How a chat model is asked."""

    model: str = Field(description="Name of the model at the endpoint.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    max_tokens: int = Field(512, ge=1, description="Maximum tokens of the model's answer.")


class CachingClient:
    """Asks a service and caches the answers. Safe to call from several threads; subclasses implement `call`.

    Args:
        settings: how to call the service.

    Attributes:
        asked: number of questions so far, whether a call or the cache answered them.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._memory: dict[str, Any] = {}
        self.asked = 0
        self._told = False

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The service's answer to `body` at `path`.

        Raises:
            ChatFailed: if no attempt got an answer in time.
        """
        # A model is identified by its name, wherever it is served; any other service by its address.
        whose = "" if "model" in body else f"{self.name}\n"
        key = hashlib.sha256(f"{whose}{path}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()
        with self._lock:
            self.asked += 1
            known = self._memory.get(key)
            if known is None:
                known = self._read(key)
        # Without the lock, as a call takes seconds. Two threads with the same question both ask; either answer will do.
        if known is None:
            known = self._attempts(path, body)
            self._write(key, known)
        with self._lock:
            self._memory[key] = known
        return known

    def _attempts(self, path: str, body: Mapping[str, Any]) -> Any:
        reason = ""
        for attempt in range(self.settings.attempts):
            if attempt:
                time.sleep(_PAUSE_SECONDS * attempt)
            try:
                return self.call(path, body)
            except CallFailed as error:
                reason = str(error)
                if not error.again:
                    break  # another attempt would be refused too
        raise ChatFailed(f"{self.name} did not answer ({reason})")

    @property
    def name(self) -> str:
        """What messages call the service."""
        return type(self).__name__

    def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """Make one call; returns the answer as JSON values.

        Raises:
            CallFailed: if there is no answer.
        """
        raise TypeError(f"{type(self).__name__} does not implement call")

    def _read(self, key: str) -> Any:
        folder = self.settings.cache
        if folder is None:
            return None
        try:
            return json.loads((folder / key[:2] / f"{key}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # not cached, or half written: ask again

    def _write(self, key: str, value: Any) -> None:
        folder = self.settings.cache
        if folder is None:
            return
        place = folder / key[:2]
        scratch = ""
        try:
            place.mkdir(parents=True, exist_ok=True)
            # A file name of its own for each writer, because threads and runs may write the same answer at the same
            # time.
            handle, scratch = tempfile.mkstemp(dir=place)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file)
            os.replace(scratch, place / f"{key}.json")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            with self._lock:
                told, self._told = self._told, True
            if not told:  # once, because it would be the same for every answer
                log.warning(
                    "the answers of %s cannot be stored in %s (%s); they are kept for this run only.",
                    *(self.name, folder, error.strerror or error),
                )


class JsonClient(CachingClient):
    """Posts JSON."""

    settings: EndpointSettings

    def __init__(self, settings: EndpointSettings) -> None:
        super().__init__(settings)

    @property
    def name(self) -> str:
        """The address of the service."""
        return self.settings.endpoint

    def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """See `CachingClient.call`."""
        s = self.settings
        headers = {"Content-Type": "application/json"}
        if s.key_variable and (secret := os.environ.get(s.key_variable)):
            headers["Authorization"] = f"Bearer {secret}"
        request = urllib.request.Request(s.endpoint + path, json.dumps(body).encode(), headers)
        deadline, received = time.monotonic() + s.timeout, b""
        try:
            # urllib limits each read, and a service that keeps sending white space would never exceed that.
            with urllib.request.urlopen(request, timeout=s.timeout) as answer:
                while len(received) < _MOST_BYTES and (piece := answer.read1(_MOST_BYTES)):
                    received += piece
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it did not answer within {s.timeout:g} s")
            return json.loads(received)
        except urllib.error.HTTPError as error:
            raise CallFailed(f"status {error.code}", again=error.code >= 500 or error.code == 429) from error
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise CallFailed(f"{type(error).__name__}: {error}"[:200], again=True) from error


class ChatClient(JsonClient):
    """Asks a chat model."""

    settings: ChatSettings

    def __init__(self, settings: ChatSettings) -> None:
        super().__init__(settings)

    def call(self, path: str, body: Mapping[str, Any]) -> Any:
        """See `CachingClient.call`."""
        answer = super().call(path, body)
        # Checked here, before caching: gateways report an overload with status 200, which must not be cached.
        if _text_in(answer) is None:
            raise CallFailed(f"its answer contains no text: {str(answer)[:100]}", again=True)
        return answer

    def ask(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The model's answer to a conversation.

        Raises:
            ChatFailed: if there is none.
        """
        return self._said("/chat/completions", {"messages": [dict(message) for message in messages]})

    def go_on(self, ids: Sequence[int]) -> str:
        """The model's continuation of token ids, as text, through /completions (vLLM and SGLang accept ids there).

        Raises:
            ChatFailed: if there is none.
        """
        return self._said("/completions", {"prompt": list(ids)})

    def _said(self, path: str, question: Mapping[str, Any]) -> str:
        s = self.settings
        body = {"model": s.model, **question, "temperature": s.temperature, "max_tokens": s.max_tokens}
        answer = self.post(path, body)
        text = _text_in(answer)
        if text is None:  # something else has written into the folder
            raise ChatFailed(f"{s.endpoint} sent an answer that contains no text: {str(answer)[:100]}")
        return text


def _text_in(answer: Any) -> str | None:
    """The text of a chat message or completion; None if the answer has none."""
    try:
        choice = answer["choices"][0]
        return str((choice["message"]["content"] if "message" in choice else choice["text"]) or "")
    except (KeyError, IndexError, TypeError):
        return None


def object_in(reply: str) -> dict[str, Any] | None:
    """The JSON object in a model's reply, whatever is around it; None if none can be read."""
    try:
        found: dict[str, Any] = json.loads(reply[reply.index("{") : reply.rindex("}") + 1])
    except (ValueError, RecursionError):  # the latter for deeply nested brackets
        return None
    return found
