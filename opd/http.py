"""HTTP calls to services that are not trusted: each has one deadline and a limit on the bytes of its answer.

    connection = Connection("http://127.0.0.1:8000/v1", seconds=30.0)
    reply = connection.call("/chat/completions", {"model": "m", ...})   # POST; GET without a body
    if reply.ok:
        print(reply.json())

The deadline covers the whole call: connecting, TLS, sending, status line, interim answers, headers and body. The limit
covers every byte that is received. Redirects are not followed, since they would take the key to another host, and
content is not decompressed. A connection is kept open between calls and can be ended from another thread. Only looking
up a host's name is left to the limits of the system's resolver.
"""

import json
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Self
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore2

from opd.strict_json import read_json

MOST_BYTES = 4_000_000
"""Largest answer, unless a call says otherwise."""
_CONNECT_SECONDS = 10.0
_PIECE = 2**16
_TIMES = (TimeoutError, httpcore2.TimeoutException)
_FAILURES = (
    *(OSError, ValueError),
    *(httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.ProxyError, httpcore2.UnsupportedProtocol),
)


class NoReplyError(Exception):
    """No complete answer arrived; the message is a clause without the address."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        status: HTTP status.
        raw: the body.
    """

    status: int
    raw: bytes

    @property
    def ok(self) -> bool:
        """Whether the call succeeded; a redirect did not."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """The body as JSON values.

        Raises:
            ValueError: if it is not JSON.
        """
        return read_json(self.raw)

    def quoted(self, most: int = 500) -> str:
        """The beginning of the body on one line, for messages."""
        return " ".join(self.raw[:most].decode(errors="replace").split())


class Connection:
    """A connection to a service, for one call at a time.

    Args:
        url: http or https address; the path of each call is appended to it.
        seconds: time that a call may take altogether.
        key: sent as a bearer token, or None.
        proxied: whether to use the proxy that the environment names (http_proxy, no_proxy), if it is not this host.

    Attributes:
        url, seconds: as given.
    """

    def __init__(self, url: str, *, seconds: float, key: str | None = None, proxied: bool = False) -> None:
        self.url, self.seconds, self._key, self._proxied = url, seconds, key, proxied
        self._line = _Line()
        self._pool: httpcore2.ConnectionPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, path: str = "", body: object = None, *, most_bytes: int = MOST_BYTES) -> Reply:
        """GET, or POST `body` as JSON if there is one.

        Args:
            path: appended to the address.
            body: JSON values.
            most_bytes: largest number of bytes to receive, headers included.

        Raises:
            NoReplyError: if no complete answer arrived in time, or it is too large, or the address is not valid.
        """
        data = None if body is None else json.dumps(body).encode()
        opened = self._line.begin(self.seconds, most_bytes)
        try:
            try:
                return self._exchange(path, data)
            except (httpcore2.NetworkError, httpcore2.RemoteProtocolError):
                # A server closes connections that were idle for a few seconds, which does not mean that it is gone.
                if self._line.opened > opened or self._line.received or self._line.was_cut:
                    raise
                return self._exchange(path, data)
        except _TIMES as error:
            late = time.monotonic() >= self._line.until
            said = f"it did not answer within {self.seconds:g} s" if late else "connecting took too long"
            raise NoReplyError(said) from error
        except _FAILURES as error:
            raise NoReplyError(f"{type(error).__name__}: {error}"[:300]) from error

    def _exchange(self, path: str, data: bytes | None) -> Reply:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "opd"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # As bytes, since an address or a key that is not ASCII would otherwise be a TypeError.
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        if self._pool is None:
            self._pool = self._open()
        method, url = "GET" if data is None else "POST", (self.url + path).encode()
        body = bytearray()  # not a list of pieces, which may be a few bytes each
        with self._pool.stream(method, url, headers=sent, content=data) as got:
            for piece in got.iter_stream():
                body += piece
        return Reply(got.status, bytes(body))

    def _open(self) -> httpcore2.ConnectionPool:
        parts = urlsplit(self.url)
        proxy = _proxy(parts.scheme, parts.hostname or "") if self._proxied else None
        trusted = _trusted() if parts.scheme == "https" else None
        return httpcore2.ConnectionPool(trusted, proxy, max_connections=1, network_backend=self._line)

    def cut(self) -> None:
        """End, from another thread, the call under way and all later ones; the server sees a client that hung up."""
        self._line.cut()

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _Line(httpcore2.NetworkBackend):
    """The network as one connection sees it: each operation gets what the call has left of its time and bytes.

    Attributes:
        until: end of the call by the monotonic clock.
        opened: number of connections that were begun.
        received: number of bytes received in the call.
        was_cut: whether `cut` was called.
    """

    def __init__(self) -> None:
        self._network = httpcore2.SyncBackend()
        self._socket: socket.socket | None = None
        self.until, self._most_bytes, self.received = 0.0, 0, 0
        self.opened, self.was_cut = 0, False

    def begin(self, seconds: float, most_bytes: int) -> int:
        """Begin a call; returns `opened`."""
        self.until, self._most_bytes, self.received = time.monotonic() + seconds, most_bytes, 0
        return self.opened

    def left(self) -> float:
        """Seconds left.

        Raises:
            TimeoutError: if there are none.
            ConnectionAbortedError: if the connection was cut.
        """
        if self.was_cut:
            raise ConnectionAbortedError("it was cut")
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def count(self, piece: bytes) -> bytes:
        """Count what was received.

        Raises:
            ValueError: if it is more than allowed.
        """
        self.received += len(piece)
        if self.received > self._most_bytes:
            raise ValueError(f"its answer is larger than {self._most_bytes} bytes")
        return piece

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = (),
    ) -> httpcore2.NetworkStream:
        """See `NetworkBackend`; does not connect after a cut, since a host that is gone would take the whole limit."""
        # A host that is gone does not refuse connections, and a call may have much longer than connecting should take.
        seconds = min(_CONNECT_SECONDS, self.left())
        self.opened += 1
        return self.held(self._network.connect_tcp(host, port, seconds, local_address, socket_options or ()))

    def held(self, stream: httpcore2.NetworkStream) -> httpcore2.NetworkStream:
        """A new stream, from now on the one that is cut."""
        self._socket = stream.get_extra_info("socket")
        found = _Stream(stream, self)
        try:
            self.left()  # it may have been cut while there was no socket to shut down
        except OSError:
            stream.close()
            raise
        return found

    def cut(self) -> None:
        self.was_cut, held = True, self._socket
        if held is not None:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


class _Stream(httpcore2.NetworkStream):
    """A stream whose limits are those of the call instead of one timeout for each operation."""

    def __init__(self, stream: httpcore2.NetworkStream, line: _Line) -> None:
        self._stream, self._line = stream, line

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._line.count(self._stream.read(max_bytes, self._line.left()))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):
            self._stream.write(buffer[start : start + _PIECE], self._line.left())

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return self._line.held(self._stream.start_tls(ssl_context, server_hostname, self._line.left()))

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@cache
def _trusted() -> ssl.SSLContext:
    """The certificates that this system trusts; read once, because it takes a while."""
    return ssl.create_default_context()


def _proxy(scheme: str, host: str) -> httpcore2.Proxy | None:
    """The proxy for a host; None if the environment names none, or the host is this one."""
    found = getproxies().get(scheme)
    if not found or host == "localhost" or host.startswith("127.") or host == "::1" or proxy_bypass(host):
        return None
    at = urlsplit(found if "://" in found else f"http://{found}")
    login = None if at.username is None else (unquote(at.username), unquote(at.password or ""))
    return httpcore2.Proxy(f"{at.scheme}://{at.netloc.rpartition('@')[2]}", auth=login)
