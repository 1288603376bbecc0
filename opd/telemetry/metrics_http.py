"""The endpoint /metrics of servers and students, with /healthz for probes that only speak HTTP and pages of JSON."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.process_collector import ProcessCollector

from opd import __version__


def describe_process(registry: CollectorRegistry) -> None:
    """Add the series of this process: memory, CPU time, open files, start, and the version of opd that it runs."""
    ProcessCollector(registry=registry)
    text = "1, with the version of opd that the process runs."
    Gauge("opd_build_info", text, ["version"], registry=registry).labels(__version__).set(1)


PATIENCE_SECONDS = 10.0
"""Seconds after which an idle connection is closed, because each one holds a thread."""


def serve_metrics(
    registry: CollectorRegistry,
    port: int,
    host: str = "127.0.0.1",
    *,
    healthy: Callable[[], bool] = lambda: True,
    pages: Mapping[str, Callable[[], str]] | None = None,
) -> tuple[Any, Thread]:
    """Serve the registry over HTTP on a daemon thread.

    Args:
        registry: the registry whose metrics are served.
        port: port to listen on; 0 for any free one.
        host: address to listen on.
        healthy: decides the status of /healthz, 200 if it returns True, else 503; called on the server's threads.
        pages: makes the JSON text of further paths, called likewise; may be filled later.

    Returns:
        The HTTP server, with `server_port`, `shutdown()` and `server_close()`, and its thread.

    Raises:
        OSError: if the address cannot be listened on.
    """
    server, thread = start_http_server(port, addr=host, registry=registry)
    metrics: Any = server.get_app()

    def app(environ: Any, start_response: Any) -> Any:
        path, kind = environ.get("PATH_INFO"), "text/plain"
        if pages and path in pages:
            status, body, kind = "200 OK", pages[path]().encode(), "application/json"
        elif path == "/healthz":
            status, body = ("200 OK", b"ok\n") if healthy() else ("503 Service Unavailable", b"not serving\n")
        else:
            return metrics(environ, start_response)
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
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
