"""Serving the HTTP door with uvicorn, in the server's process and event loop.

uvicorn waits without a limit for the head of a request, so connections here have one, and there are only so many.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from opd.errors import ConfigError, PortInUseError
from teacher_server.calls.gate import Gate
from teacher_server.calls.score_call import Shared
from teacher_server.http.door import Door
from teacher_server.rpc.receive import RequestReceiver
from teacher_server.settings import SecuritySettings

_log = logging.getLogger(__name__)

IDLE_SECONDS = 30
"""Seconds that a connection may stay open between two requests."""


class Connection(H11Protocol):
    """A connection whose requests must arrive in time.

    The class attributes are those of one server; see `Listener`.
    """

    head_seconds = 20.0
    most = 512
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Closes the connection at once if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        super().connection_lost(exc)
        self._forget()

    def data_received(self, data: bytes) -> None:
        """Begins to wait for the rest of a head, or ends that."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the teacher server's."""
        yield


class Listener:
    """Serves the door; bound to its port from the beginning, and open once started.

    Args:
        shared, gate, receiver, serving: as for `Door`.

    Raises:
        PortInUseError: if the port is taken.
        ConfigError: if a TLS file cannot be read.
    """

    def __init__(self, shared: Shared, gate: Gate, receiver: RequestReceiver, serving: Callable[[], bool]) -> None:
        settings = shared.settings
        limits = {"head_seconds": settings.calls.receive_seconds, "most": settings.http.max_connections}
        config = uvicorn.Config(
            Door(shared, gate, receiver, serving).app,
            http=type("_Connection", (Connection,), limits),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,  # a caller could claim any address
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        config.load()
        self._security = settings.security
        self._stamps = _stamps(self._security)
        self._tls = config.ssl = tls_context(self._security) if self._security.tls_cert is not None else None
        self._server = _Server(config)
        self._place = _bound(settings.host.strip("[]"), settings.http.port)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> int:
        """Begin to accept connections; returns the port."""
        self._serving = asyncio.create_task(self._server.serve([self._place]))
        port: int = self._place.getsockname()[1]
        return port

    def reload(self) -> None:
        """Use certificate and key anew if they have changed; if they cannot be used, the old ones stay."""
        if self._tls is None or (stamps := _stamps(self._security)) == self._stamps:
            return
        self._stamps = stamps
        try:
            tls_context(self._security)  # a pair that does not match would spoil the context in use
            self._tls.load_cert_chain(self._security.tls_cert or "", self._security.tls_key)
        except (ConfigError, OSError) as error:
            _log.error("certificates refused, old ones stay", extra={"reason": error})
        else:
            _log.info("certificates reloaded")

    async def cut(self) -> None:
        """Cut off the calls that are open."""
        tasks = list(self._server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cut off what is open and close the port."""
        await self.cut()
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._place.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise PortInUseError(
            f"cannot listen on {host}, port {port}, for HTTP: {error.strerror}; choose another --http-port."
        ) from error


def _stamps(security: SecuritySettings) -> list[tuple[int, int]]:
    found = []
    for file in (security.tls_cert, security.tls_key):
        with contextlib.suppress(OSError):
            if file is not None:
                found.append(((info := file.stat()).st_mtime_ns, info.st_ino))
    return found


def tls_context(security: SecuritySettings) -> ssl.SSLContext:
    """TLS as the gRPC service has it.

    Raises:
        ConfigError: if a file cannot be read.
    """
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=security.client_ca)
        context.load_cert_chain(security.tls_cert or "", security.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_cert {security.tls_cert} cannot be used: {error}; check it and tls_key.") from None
    if security.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context
