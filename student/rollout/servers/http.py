"""A connection to a rollout server: JSON over HTTP, kept open between calls, and closable from another thread."""

import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

from opd.errors import RolloutEngineError

_CONNECT_SECONDS = 10.0


class LostError(Exception):
    """The server cannot be reached or does not answer in time."""


class RefusedError(RolloutEngineError):
    """The server answered with an error.

    Attributes:
        code: HTTP status.
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
        """A new connection to the same server with the same key, and the same timeout unless another is given."""
        return Connection(self.url, self._api_key, self.timeout if timeout is None else timeout)

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET (no body) or POST a JSON object; None for an answer that is empty or not JSON.

        Raises:
            LostError: if no complete answer arrived.
            RefusedError: if the answer is an error.
        """
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        try:
            answer, raw = self._exchange(method, self._base + path, data)
        except (OSError, http.client.HTTPException) as error:
            self.close()  # so that a late answer to this call is not taken for that of the next
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
            # Do not connect after a cut: connecting to a host that is gone takes the whole timeout.
            if not kept and not self._cut:
                self._open()
            if self._cut:
                # It was cut between calls or while opening, when there was no socket to shut down; without this check,
                # this call and later ones would still be made.
                raise ConnectionAbortedError("it was cut")
            self._connection.request(method, path, data, self._headers)
            answer = self._connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionError):
            # A server closes connections that were idle for a few seconds, which does not mean that it is gone.
            if not kept or self._cut:
                raise
            self.close()
            return self._exchange(method, path, data)
        return answer, answer.read()

    def _open(self) -> None:
        # A host that is gone does not refuse connections; with the timeout of a row, connecting could take very long.
        self._connection.timeout = min(_CONNECT_SECONDS, self.timeout)
        self._connection.connect()
        self._connection.sock.settimeout(self.timeout)

    def cut(self) -> None:
        """End a call in which another thread is waiting; the server sees a client that disconnected."""
        self._cut = True
        held = self._connection.sock
        if held is not None:
            try:
                held.shutdown(socket.SHUT_RDWR)
            except OSError:
                return

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        self._connection.close()
