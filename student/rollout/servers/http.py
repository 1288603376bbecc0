"""A connection to a rollout server: JSON over HTTP, kept open between calls, and closable from another thread."""

from typing import Any

from opd.errors import RolloutEngineError
from opd.http import MOST_BYTES, NoReplyError
from opd.http import Connection as HttpConnection


class LostError(Exception):
    """The server cannot be reached, does not answer in time, or answers with something that cannot be used."""


class RefusedError(RolloutEngineError):
    """The server answered with an error.

    Attributes:
        code: HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.code = status


class Connection(HttpConnection):
    """Calls a server, one call at a time.

    Args:
        url: its address.
        api_key: sent as a bearer token, or None.
        seconds: time that a call may take.
    """

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        super().__init__(url, seconds=seconds, key=api_key)

    def another(self, seconds: float | None = None) -> "Connection":
        """A new connection to the same server with the same key, and the same time limit unless another is given."""
        return Connection(self.url, self._key, self.seconds if seconds is None else seconds)

    def call(self, path: str, body: dict[str, Any] | None = None, *, most_bytes: int = MOST_BYTES) -> Any:
        """GET (no body) or POST a JSON object; None for an answer that is empty or not JSON.

        Raises:
            LostError: if no complete answer arrived.
            RefusedError: if the answer is an error or a redirect.
        """
        try:
            reply = self.send(path, body, most_bytes=most_bytes)
        except NoReplyError as error:
            raise LostError(f"{self.url} does not answer ({error})") from error
        if not reply.ok:
            raise RefusedError(f"{self.url}{path} answered {reply.status}: {reply.quoted()}", reply.status)
        try:
            return reply.json()
        except ValueError:
            return None
