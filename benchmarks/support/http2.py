"""A bare HTTP/2 client that does what gRPC's own never would: stop in mid-message, and never say that it is done.

It speaks just enough of RFC 9113 to open gRPC calls, and keeps to the windows that the server grants, so that what it
has sent is what the server has agreed to hold.
"""

import select
import socket
import struct
import time

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4
_FRAME_BYTES = 16_384


class Http2Connection:
    """One connection with any number of calls.

    Args:
        address: "host:port" of a server in the clear.

    Attributes:
        ended: ids of the calls that the server has ended.
        max_streams: how many calls at once the server allows on one connection; 0 when it does not say.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 30)
        self._buffer = b""
        self._window = 65_535
        self._initial = 65_535
        self._windows: dict[int, int] = {}
        self._next = 1
        self._answered_pings = 0
        self.ended: set[int] = set()
        self.max_streams = 0
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_SETTINGS, 0, 0, b"")

    def open(self, method: str, metadata: dict[str, str] | None = None, *, half_close: bool = False) -> int:
        """Send the headers of a call to "/service/method"; returns its id."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._initial
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **(metadata or {}),
        }
        # Literal header fields without indexing: no table, no Huffman code.
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._send(_HEADERS, _END_HEADERS | (_END_STREAM if half_close else 0), stream, block)
        return stream

    def send(self, stream: int, data: bytes, *, patience: float = 0.5) -> int:
        """Send as much of `data` as the server's windows let through; gives up after `patience` seconds without any.

        Returns:
            The bytes that were sent.
        """
        sent, last = 0, time.monotonic()
        while sent < len(data) and stream not in self.ended:
            size = min(_FRAME_BYTES, len(data) - sent, self._window, self._windows[stream])
            if size <= 0:
                if time.monotonic() - last > patience:
                    break
                self.read(0.05)
                continue
            self._send(_DATA, 0, stream, data[sent : sent + size])
            sent, last = sent + size, time.monotonic()
            self._window -= size
            self._windows[stream] -= size
            self.read(0.0)
        return sent

    def read(self, seconds: float) -> None:
        """Handle the frames that arrive within `seconds`."""
        end = time.monotonic() + seconds
        while select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
            data = self._socket.recv(1 << 16)
            if not data:
                self.ended.update(self._windows)
                return
            self._buffer += data
            self._frames()

    def settle(self, seconds: float = 60.0) -> None:
        """Read until the server has taken all that was sent: it answers a ping behind it.

        Raises:
            TimeoutError: when it has not after `seconds`.
        """
        wanted = self._answered_pings + 1
        self._send(_PING, 0, 0, bytes(8))
        end = time.monotonic() + seconds
        while self._answered_pings < wanted:
            if time.monotonic() > end:
                raise TimeoutError("a ping was not answered.")
            self.read(0.05)

    def wait_until_ended(self, streams: list[int], seconds: float = 60.0, *, count: int | None = None) -> None:
        """Read until the server has ended all of `streams`, or `count` of them.

        Raises:
            TimeoutError: when it has not after `seconds`.
        """
        end = time.monotonic() + seconds
        wanted = len(streams) if count is None else count
        while len(self.ended.intersection(streams)) < wanted:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(set(streams) - self.ended)} of {len(streams)} calls are still open.")
            self.read(0.05)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _frames(self) -> None:
        while len(self._buffer) >= 9:
            length = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + length:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
            body, self._buffer = self._buffer[9 : 9 + length], self._buffer[9 + length :]
            self._handle(kind, flags, stream, body)

    def _handle(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _WINDOW_UPDATE:
            more = int.from_bytes(body, "big") & 0x7FFFFFFF
            if stream:
                self._windows[stream] = self._windows.get(stream, 0) + more
            else:
                self._window += more
        elif kind == _SETTINGS and not flags & _ACK:
            for key, value in struct.iter_unpack(">HI", body):
                if key == _INITIAL_WINDOW_SIZE:
                    self._windows = {s: w + value - self._initial for s, w in self._windows.items()}
                    self._initial = value
                elif key == _MAX_CONCURRENT_STREAMS:
                    self.max_streams = value
            self._send(_SETTINGS, _ACK, 0, b"")
        elif kind == _PING and not flags & _ACK:
            self._send(_PING, _ACK, 0, body)
        elif kind == _PING:
            self._answered_pings += 1
        elif kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
            self.ended.add(stream)

    def _send(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        head = len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._socket.sendall(head + body)


def grpc_message(size: int) -> bytes:
    """The first bytes of a gRPC message that announces `size` bytes, followed by that many zeros less one."""
    return b"\0" + size.to_bytes(4, "big") + bytes(size - 1)


def _text(value: str) -> bytes:
    data = value.encode("ascii")
    if len(data) > 126:
        raise ValueError("header values of more than 126 bytes are not needed here.")
    return bytes((len(data),)) + data
