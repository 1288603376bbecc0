"""The /metrics endpoint of servers and students, and /healthz beside it for probes that speak HTTP alone."""

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

PATIENCE_SECONDS = 10.0
"""A connection that is idle for so long is closed, because each one holds a thread."""


def serve_metrics(
    registry: CollectorRegistry, port: int, host: str = "127.0.0.1", *, healthy: Callable[[], bool] = lambda: True
) -> tuple[Any, Thread]:
    """Serve the registry over HTTP on a daemon thread.

    Args:
        registry: what to show.
        port: to listen on; 0 for any free one.
        host: address to listen on.
        healthy: what /healthz answers: 200 while it gives True, else 503; called on the server's thread.

    Returns:
        The HTTP server, with `server_port`, `shutdown()` and `server_close()`, and its thread.

    Raises:
        OSError: when the address cannot be listened on.
    """
    server, thread = start_http_server(port, addr=host, registry=registry)
    metrics: Any = server.get_app()

    def app(environ: Any, start_response: Any) -> Any:
        if environ.get("PATH_INFO") != "/healthz":
            return metrics(environ, start_response)
        status, body = ("200 OK", b"ok\n") if healthy() else ("503 Service Unavailable", b"not serving\n")
        start_response(status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    server.set_app(app)
    base: Any = server.RequestHandlerClass

    class Handler(base):  # type: ignore[misc]
        timeout = PATIENCE_SECONDS

        def handle(self) -> None:
            # Port scanners and load balancers hang up at will; the default is a traceback on standard error.
            with suppress(TimeoutError, ConnectionError):
                super().handle()

    server.RequestHandlerClass = Handler
    return server, thread
