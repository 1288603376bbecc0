"""One connection to a rollout server: JSON in and out, kept open between calls, and cut from another thread."""

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from opd.errors import RolloutEngineError

_CONNECT_SECONDS = 10.0


class LostError(Exception):
    """The server cannot be reached, or does not answer in time."""


class RefusedError(RolloutEngineError):
    """The server answered that it will not.

    Attributes:
        code: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.code = status


class Connection:
    """Calls a server, one call at a time.

    Args:
        url: its address.
        api_key: sent as a bearer token, or None.
        timeout: seconds to wait for an answer.

    Attributes:
        url, timeout: as given.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url, self.timeout, self._base, self._api_key = url, timeout, parts.path, api_key
        self._connection = kind(parts.hostname or "", parts.port, timeout=timeout)
        self._cut = False
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def another(self, timeout: float | None = None) -> "Connection":
        """To the same server, with the same key, and the same time unless another is given."""
        return Connection(self.url, self._api_key, self.timeout if timeout is None else timeout)

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET (no body) or POST a JSON object; None for an answer that is empty or not JSON.

        Raises:
            LostError: when no whole answer came.
            RefusedError: when the answer is an error.
        """
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            answer, raw = self._exchange(method, self._base + path, data)
        except (OSError, http.client.HTTPException) as error:
            self.close()  # whatever still comes belongs to this call
            raise LostError(f"{self.url} does not answer ({type(error).__name__}: {error})") from error
        if answer.status >= 400:
            said = " ".join(raw[:500].decode(errors="replace").split())
            raise RefusedError(f"{self.url}{path} answered {answer.status}: {said}", answer.status)
        try:
            return json.loads(raw) if raw.strip() else None
        except ValueError:
            return None

    def _exchange(self, method: str, path: str, data: bytes | None) -> tuple[http.client.HTTPResponse, bytes]:
        kept = self._connection.sock is not None
        try:
            # Not after a cut: a host that is gone takes all the time there is to connect.
            if not kept and not self._cut:
                self._open()
            if self._cut:
                # It was cut between two calls, or while it was opened: there was nothing to shut down then, and this
                # call would be made all the same, and the next ones.
                raise ConnectionAbortedError("it was cut")
            self._connection.request(method, path, data, self._headers)
            answer = self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            # A server closes what was idle for a few seconds: that tells nothing of whether it lives.
            if not kept or self._cut:
                raise
            self.close()
            return self._exchange(method, path, data)
        return answer, answer.read()

    def _open(self) -> None:
        # A host that is gone refuses nothing: connecting would take as long as the slowest row may.
        self._connection.timeout = min(_CONNECT_SECONDS, self.timeout)
        self._connection.connect()
        self._connection.sock.settimeout(self.timeout)

    def cut(self) -> None:
        """End a call that another thread is waiting for; the server takes it as given up."""
        self._cut = True
        held = self._connection.sock
        if held is not None:
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        """Close it; another call opens it again."""
        self._connection.close()
