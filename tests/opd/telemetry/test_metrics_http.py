import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge
from waiting import wait_until

from opd.telemetry import metrics_http


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle connections are closed soon; a fixture of its own, as a slow client is closed too."""
    monkeypatch.setattr(metrics_http, "PATIENCE_SECONDS", 1.0)


@pytest.fixture
def port() -> Iterator[int]:
    registry = CollectorRegistry()
    Gauge("opd_answer", "The answer.", registry=registry).set(42)
    server, thread = metrics_http.serve_metrics(registry, 0, "127.0.0.1")
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(10)
    assert not thread.is_alive()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        return str(answer.read().decode())


def test_the_registry_is_served(port: int) -> None:
    assert "opd_answer 42.0" in scrape(port)


def test_connections_that_say_nothing_are_closed_in_silence(
    brief: None, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(20)]
    silent[0].sendall(b"GET /metr")
    assert "opd_answer" in scrape(port)
    for connection in silent:
        assert connection.recv(100) == b""
        connection.close()
    wait_until(lambda: threading.active_count() <= threads)
    assert capfd.readouterr().err == ""


def test_clients_that_hang_up_leave_no_traceback(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for sent in (b"", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\n\r\n"):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(sent)
        if sent.endswith(b"\r\n\r\n"):
            client.recv(1)
        else:
            wait_until(lambda: threading.active_count() > before)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
        client.close()
        wait_until(lambda: threading.active_count() <= before)
    assert capfd.readouterr().err == ""


def test_healthz_follows_the_health_of_the_server() -> None:
    healthy = True
    server, thread = metrics_http.serve_metrics(CollectorRegistry(), 0, "127.0.0.1", healthy=lambda: healthy)
    try:
        url = f"http://127.0.0.1:{server.server_port}/healthz"
        with urllib.request.urlopen(url, timeout=120) as answer:
            assert answer.status == 200
        healthy = False
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(url, timeout=120)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
