"""The endpoint /metrics of servers and students, and /healthz beside it for probes that only speak HTTP."""

from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

PATIENCE_SECONDS = 10.0
"""Seconds after which an idle connection is closed, because each one holds a thread."""


def serve_metrics(
    registry: CollectorRegistry, port: int, host: str = "127.0.0.1", *, healthy: Callable[[], bool] = lambda: True
) -> tuple[Any, Thread]:
    """Serve the registry over HTTP on a daemon thread.

    Args:
        registry: the registry whose metrics are served.
        port: port to listen on; 0 for any free one.
        host: address to listen on.
        healthy: decides the status of /healthz, 200 if it returns True, else 503; called on the server's threads.

    Returns:
        The HTTP server, with `server_port`, `shutdown()` and `server_close()`, and its thread.

    Raises:
        OSError: if the address cannot be listened on.
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
            # Port scanners and load balancers hang up at will; by default each would cause a traceback on standard
            # error.
            with suppress(TimeoutError, ConnectionError):
                super().handle()

    server.RequestHandlerClass = Handler
    return server, thread
