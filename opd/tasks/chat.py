"""A client of OpenAI-compatible chat endpoints, for judges; vLLM, SGLang and most services have such an endpoint.

    client = ChatClient(ChatSettings(endpoint="http://host:8000/v1", model="judge"))
    text = client.ask([{"role": "user", "content": "..."}])

Answers are cached in memory and, with `cache`, in a folder, by a hash of everything that decides them, so that a step
that is taken again, or a run that is resumed, gets the same answers. Only the text or score of an answer is kept. A
call that fails, takes too long or reports an error, with whatever status, raises `ChatFailed` after `attempts` and is
never cached; whatever was asked about is then unknown. If the folder cannot be written, the run continues without it.
The key is read from an environment variable and appears in no recipe, hash or message.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import one_line
from opd.http import Connection, NoReplyError
from opd.strict_json import read_json

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.5
_TOKEN_CHARACTERS = 256
"""Longer than tokens are: a text with more characters for each of `max_tokens` did not come from a model."""


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

    timeout: float = Field(
        30.0, gt=0, description="Seconds that one call to the service may take, from connecting to the last byte."
    )
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
        """What is kept of the service's answer to `body` at `path`.

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
                return self.kept(self.call(path, body))
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

    def kept(self, answer: Any) -> Any:
        """The part of an answer that is used and cached, of the same form; here the score, null if it is not a number.

        Raises:
            CallFailed: if the service gave no answer, but reports an error for example.
        """
        if not isinstance(answer, dict) or "score" not in answer or answer.get("error"):
            raise CallFailed("its answer contains no score", again=True)
        score = answer["score"]
        # Not math.isfinite, which fails on integers that are too large for a float.
        readable = isinstance(score, int | float) and abs(score) <= sys.float_info.max
        return {"score": score if readable else None}

    def close(self) -> None:
        """Release what is open; here nothing, as each call has its own connection."""

    def _read(self, key: str) -> Any:
        folder = self.settings.cache
        if folder is None:
            return None
        try:
            return self.kept(read_json((folder / key[:2] / f"{key}.json").read_bytes()))
        except (OSError, ValueError, CallFailed):
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
        s = self.settings
        key = os.environ.get(s.key_variable) if s.key_variable else None
        try:
            with Connection(s.endpoint, seconds=s.timeout, key=key, proxied=True) as connection:
                reply = connection.send(path, body)
            if reply.ok:
                return reply.json()
        except (NoReplyError, ValueError) as error:
            raise CallFailed(one_line(error, 200), again=True) from error
        raise CallFailed(f"status {reply.status}", again=reply.status >= 500 or reply.status == 429)


class ChatClient(JsonClient):
    """Asks a chat model."""

    settings: ChatSettings

    def __init__(self, settings: ChatSettings) -> None:
        super().__init__(settings)

    def kept(self, answer: Any) -> Any:
        """See `CachingClient.kept`; here the text."""
        text = _text_in(answer)
        if text is None or answer.get("error"):
            raise CallFailed("its answer contains no text", again=True)
        if len(text) > _TOKEN_CHARACTERS * self.settings.max_tokens:
            raise CallFailed(f"its answer has {len(text)} characters, too many for max_tokens", again=True)
        return {"choices": [{"text": text}]}

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
        return str(self.post(path, body)["choices"][0]["text"])


def _text_in(answer: Any) -> str | None:
    """The text of a chat message or completion; None if the answer has none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        return None
    return text if isinstance(text, str) else "" if text is None else None


def object_in(reply: str) -> dict[str, Any] | None:
    """The JSON object in a model's reply, whatever is around it; None if none can be read."""
    try:
        found: dict[str, Any] = read_json(reply[reply.index("{") : reply.rindex("}") + 1])
    except ValueError:
        return None
    return found
