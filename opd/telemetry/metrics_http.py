"""The /metrics endpoint of servers and students."""

from contextlib import suppress
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

PATIENCE_SECONDS = 10.0
"""A connection that says nothing for so long is closed: each one holds a thread."""


def serve_metrics(registry: CollectorRegistry, port: int, host: str = "0.0.0.0") -> tuple[Any, Thread]:
    """Serve the registry over HTTP on a daemon thread.

    Args:
        registry: what to show.
        port: to listen on; 0 for any free one.
        host: address to listen on.

    Returns:
        The HTTP server, with `server_port`, `shutdown()` and `server_close()`, and its thread.

    Raises:
        OSError: when the address cannot be listened on.
    """
    server, thread = start_http_server(port, addr=host, registry=registry)
    base: Any = server.RequestHandlerClass

    class Handler(base):  # type: ignore[misc]
        timeout = PATIENCE_SECONDS

        def handle(self) -> None:
            # Port scanners and load balancers hang up at will; the default is a traceback on standard error.
            with suppress(TimeoutError, ConnectionError):
                super().handle()

    server.RequestHandlerClass = Handler
    return server, thread
