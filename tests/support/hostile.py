"""Answers of a service that lies over HTTP, each under its name: `WIRES` are bytes, `TEXTS` bodies that are no answer.

A lie sends until the other side hangs up, so nothing here has to be stopped.
"""

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Wire = Callable[[socket.socket], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_DRIP_SECONDS = 0.02


def whole(body: str | bytes, status: str = "200 OK", *headers: str) -> Wire:
    """A complete answer."""
    raw = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(raw)}", "Connection: close", *headers]
    return _all("\r\n".join(lines).encode(), b"\r\n\r\n", raw)


def _all(*pieces: bytes) -> Wire:
    return lambda connection: _send(connection, pieces)


def _drip(first: bytes, slowly: bytes) -> Wire:
    """`first` at once, then `slowly` again and again, a byte at a time."""

    def send(connection: socket.socket) -> None:
        bytewise = (bytes([byte]) for byte in itertools.cycle(slowly))
        _send(connection, itertools.chain([first], bytewise), _DRIP_SECONDS)

    return send


def _flood(first: bytes, more: bytes) -> Wire:
    """`first`, then `more` again and again, as fast as the other side reads."""

    def send(connection: socket.socket) -> None:
        _send(connection, itertools.chain([first], itertools.repeat(more * (2**16 // len(more)))))

    return send


def _send(connection: socket.socket, pieces: Iterable[bytes], pause: float = 0.0) -> None:
    waiting = threading.Event()
    with suppress(OSError):
        for piece in pieces:
            connection.sendall(piece)
            if pause:
                waiting.wait(pause)


def _silent(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.recv(1)  # until the other side hangs up


def _then_silent(first: bytes) -> Wire:
    def send(connection: socket.socket) -> None:
        _send(connection, [first])
        _silent(connection)

    return send


SLOW: dict[str, Wire] = {
    "says nothing": _silent,
    "drips its status line": _drip(b"HTTP/1.1 200 ", b"O"),
    "drips its headers": _drip(HEAD, b"X: y\r\n"),
    "drips one header": _drip(HEAD + b"X: ", b"y"),
    "drips its body": _drip(HEAD + b"Content-Length: 99999999\r\n\r\n", b" "),
    "drips chunks": _drip(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "stops in mid body": _then_silent(HEAD + b"Content-Length: 9\r\n\r\n{"),
    "drips 100 Continue": _drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}
ENDLESS: dict[str, Wire] = {
    "sends a body without end": _flood(HEAD + b"\r\n", b" "),
    "sends more than it announced it would": _flood(HEAD + b"Content-Length: 3000000000\r\n\r\n", b" "),
    "sends chunks without end": _flood(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"4\r\n    \r\n"),
    "sends headers without end": _flood(HEAD, b"X: y\r\n"),
    "sends one header without end": _flood(HEAD + b"X: ", b"y"),
    "sends a status line without end": _flood(b"HTTP/1.1 200 ", b"O"),
    "sends 100 Continue without end": _flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "sends a chunk size without end": _flood(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"f"),
}
BROKEN: dict[str, Wire] = {
    "hangs up": lambda connection: None,
    "hangs up in mid body": _all(HEAD + b"Content-Length: 9\r\n\r\n{"),
    "hangs up in mid chunk": _all(HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\n{"),
    "speaks another protocol": _all(b"nonsense\r\n\r\n"),
    "sends a length that is a word": _all(HEAD + b"Content-Length: many\r\n\r\n{}"),
    "sends a length below zero": _all(HEAD + b"Content-Length: -5\r\n\r\n{}"),
    "switches protocols": _all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n{}"),
}
REFUSED: dict[str, Wire] = {
    f"answers {status}": whole('{"error": "no"}', status, *headers)
    for status, headers in {
        "404 Not Found": (),
        "400 Bad Request": (),
        "401 Unauthorized": (),
        "429 Too Many Requests": (),
        "500 Internal Server Error": (),
        "503 Service Unavailable": (),
        "302 Found": ("Location: http://127.0.0.1:9/elsewhere",),
        "307 Temporary Redirect": ("Location: http://127.0.0.1:9/elsewhere",),
        "308 Permanent Redirect": ("Location: /again",),
    }.items()
}
TEXTS: dict[str, str | bytes] = {
    "nothing": "",
    "a page": "<html><body>Bad gateway</body></html>",
    "null": "null",
    "a number": "1",
    "a text": '"yes"',
    "a list": "[]",
    "an empty object": "{}",
    "an error with status 200": '{"error": "overloaded"}',
    "lists that are deep": "[" * 200_000,
    "deep lists that end": "[" * 100_000 + "]" * 100_000,
    "objects that are deep": '{"a":' * 100_000,
    "bytes that are not text": b"\xff\xfe{\x80",
    "gzip that was not asked for": b"\x1f\x8b\x08\x00",
    "half an object": '{"score": 1',
}
WIRES: dict[str, Wire] = {
    **SLOW,
    **ENDLESS,
    **BROKEN,
    **REFUSED,
    **{f"sends {name}": whole(text) for name, text in TEXTS.items()},
}
"""Everything above."""
ONE_OF_EACH = [next(iter(lies)) for lies in (SLOW, ENDLESS, BROKEN, REFUSED)] + [f"sends {next(iter(TEXTS))}"]
"""Names of `WIRES`, one of each kind."""


class Liar:
    """A server that answers every request with the same lie.

    Attributes:
        url: its address.
        asked: the head of each request.
    """

    def __init__(self, lie: Wire) -> None:
        self.lie, self.asked = lie, list[str]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError), connection.makefile("rb") as lines:
            head = b"".join(iter(lines.readline, b"\r\n")).decode()
            self.asked.append(head)
            length = next(
                (int(x.split(":")[1]) for x in head.splitlines() if x.lower().startswith("content-length")), 0
            )
            lines.read(length)
            self.lie(connection)

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextmanager
def lying(lie: Wire) -> Iterator[Liar]:
    """A liar, for the length of a block."""
    made = Liar(lie)
    try:
        yield made
    finally:
        made.close()


def said(value: object) -> Wire:
    """A complete answer with these JSON values, in which NaN and Infinity are written as Python writes them."""
    return whole(json.dumps(value))
