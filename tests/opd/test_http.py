"""Calls over HTTP end in time and within their bytes, whatever the service sends."""

import contextlib
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import self_signed
from hostile import BROKEN, ENDLESS, SLOW, TEXTS, Liar, Wire, lying, said, whole

from opd import http
from opd.http import Connection, NoReplyError


@pytest.fixture
def liar() -> Iterator[Liar]:
    with lying(said({"score": 1})) as made:
        yield made


@pytest.mark.parametrize("lie", SLOW.values(), ids=SLOW)
def test_a_service_that_does_not_finish_is_given_up_when_the_time_of_the_call_is_over(liar: Liar, lie: Wire) -> None:
    liar.lie = lie
    with Connection(liar.url, seconds=0.2) as connection, pytest.raises(NoReplyError, match=r"within 0\.2 s"):
        connection.send("/", {})


@pytest.mark.parametrize("lie", ENDLESS.values(), ids=ENDLESS)
def test_what_a_service_sends_without_end_is_left_when_it_is_more_than_allowed(liar: Liar, lie: Wire) -> None:
    liar.lie = lie
    tracemalloc.start()
    with Connection(liar.url, seconds=60.0) as connection, pytest.raises(NoReplyError):
        connection.send("/", {}, most_bytes=200_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize("lie", BROKEN.values(), ids=BROKEN)
def test_an_answer_that_breaks_the_protocol_is_no_reply(liar: Liar, lie: Wire) -> None:
    liar.lie = lie
    with Connection(liar.url, seconds=5.0) as connection, contextlib.suppress(NoReplyError):
        assert not connection.send("/", {}).ok


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_body_is_json_or_a_value_error(liar: Liar, text: str | bytes) -> None:
    liar.lie = whole(text)
    with Connection(liar.url, seconds=5.0) as connection:
        reply = connection.send()
    try:
        reply.json()
    except ValueError:
        assert not reply.quoted().startswith(("null", "{}"))


def test_numbers_that_are_not_json_are_refused(liar: Liar) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        liar.lie = said([value])
        with Connection(liar.url, seconds=5.0) as connection, pytest.raises(ValueError, match="not a JSON number"):
            connection.send().json()


def test_a_redirect_is_an_answer_and_the_key_goes_nowhere_else(liar: Liar) -> None:
    with lying(said({"score": 1})) as other:
        for status in ("301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"):
            liar.lie = whole("", status, f"Location: {other.url}/steal")
            with Connection(liar.url, seconds=5.0, key="secret", proxied=True) as connection:
                assert not connection.send("/score", {}).ok
        assert other.asked == [] and "Authorization: Bearer secret" in liar.asked[0]


def test_a_connection_is_kept_and_opened_again_where_the_server_has_closed_it() -> None:
    taken: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    for _ in range(2):  # then it hangs up without a word
                        taken.append(len(connection.recv(65536)))
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        thread = threading.Thread(target=serve)
        thread.start()
        with Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=30.0) as connection:
            assert [connection.send(f"/{n}").json() for n in range(4)] == [{}] * 4
        thread.join()
    assert len(taken) == 4


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server needs to speak TLS with a certificate that clients trust."""
    certificate, key = self_signed(tmp_path, "service")
    monkeypatch.setattr(http, "_trusted", lambda: ssl.create_default_context(cafile=str(certificate)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def test_tls_is_checked_and_has_the_same_deadline(trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = said({"score": 1})

    def secure(connection: socket.socket) -> None:
        with trusted.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(65536)
            plain(wrapped)

    with tls_server(secure) as url, Connection(url, seconds=30.0) as connection:
        assert connection.send("/x").json() == {"score": 1}
    for lie in (SLOW["says nothing"], SLOW["drips its body"]):
        with tls_server(lie) as url, Connection(url, seconds=0.2) as connection, pytest.raises(NoReplyError):
            connection.send("/x")
    monkeypatch.undo()
    stranger = pytest.raises(NoReplyError, match="certificate")
    with tls_server(secure) as url, Connection(url, seconds=30.0) as connection, stranger:
        connection.send("/x")


@contextlib.contextmanager
def tls_server(answer: Wire) -> Iterator[str]:
    """Answers one connection, from its first byte on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"https://localhost:{listener.getsockname()[1]}"
        thread.join()


def test_a_proxy_of_the_environment_is_used_but_not_for_this_host(liar: Liar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with lying(said("proxy")) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        for url, proxied, found in ((liar.url, True, {"score": 1}), ("http://judge.example", True, "proxy")):
            with Connection(url, seconds=5.0, proxied=proxied) as connection:
                assert connection.send("/x").json() == found
        assert proxy.asked[0].startswith("GET http://judge.example/x ")


@pytest.mark.parametrize(
    "url", ["http://", "http://127.0.0.1:99999", "http://a b", "ftp://127.0.0.1", "http://é.example"]
)
def test_what_cannot_be_an_address_is_no_reply(url: str) -> None:
    with Connection(url, seconds=1.0) as connection, pytest.raises(NoReplyError):
        connection.send("/")


def test_a_request_that_a_server_does_not_read_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel accepts, and nothing is read
        connection = Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", seconds=0.2)
        with connection, pytest.raises(NoReplyError, match=r"within 0\.2 s"):
            connection.send("/", "x" * 50_000_000)
