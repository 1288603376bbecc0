"""Notices at once when a rank ends: each rank keeps a connection to rank 0, which forwards what it hears.

A collective notices a lost rank late and cannot name it: NCCL at its timeout, gloo in the next exchange. Here, a rank
says why it ends, or its connection breaks, and every other rank ends with that rank's error. It does so by an exception
if it can (which replaces the collective's error), and by exiting after a few seconds if it hangs in a collective.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
from types import TracebackType
from typing import Any, Protocol

from opd.errors import OpdError, RankLostError
from opd.printable import printable

GRACE_SECONDS = 3.0
"""Seconds for a rank to end by itself once another has ended."""
_NEWS_SECONDS = 2.0
"""Seconds to wait for the news of which rank ended, once a collective has failed."""
_JOIN_SECONDS = 60.0
_KILLED = "it reported no error, so it was killed or its machine was lost"


class Exchange(Protocol):
    """The part of `Ranks` that the watch uses."""

    count: int
    index: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks."""


class RankWatch:
    """Watches the other ranks in a thread; does nothing in a run of one rank.

    Args:
        ranks: all ranks.
        grace: seconds for this rank to end by itself once another has ended, before its process exits.
    """

    def __init__(self, ranks: Exchange, grace: float = GRACE_SECONDS) -> None:
        self._index, self._grace = ranks.index, grace
        self._ranks = ranks  # kept, because the process group uses the store of a meeting
        self._news = threading.Event()
        self._heard: tuple[int, str] | None = None  # the first rank that ended, and why
        self._own: str | None = None  # why this rank ends
        self._over = False  # this rank has left in order and must not be ended by the others
        self._lock = threading.Lock()  # held while sending, so that the lines of two threads do not mix
        self._peers: dict[socket.socket, int] = {}
        self._why: dict[int, str] = {}
        self._done: set[int] = set()
        if ranks.count == 1:
            return
        # Any free port. A collective distributes it and the secret, so only the ranks know them.
        server = socket.create_server(("", 0)) if ranks.index == 0 else None
        address = (server.getsockname()[1], secrets.token_hex()) if server is not None else None
        port, secret = ranks.gather(address)[0]
        if server is not None:
            self._accept(server, secret, ranks.count - 1)
        else:
            first = socket.create_connection((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), _JOIN_SECONDS)
            first.sendall(_line({"secret": secret, "rank": ranks.index}))
            self._peers[first] = 0
        for peer in self._peers:
            _keep_alive(peer)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _accept(self, server: socket.socket, secret: str, count: int) -> None:
        server.settimeout(_JOIN_SECONDS)
        with server:
            while len(self._peers) < count:
                peer, _ = server.accept()
                peer.settimeout(_JOIN_SECONDS)
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    # The port is open to the network; only a rank knows the secret.
                    hello = json.loads(_read_line(peer))
                    if secrets.compare_digest(hello["secret"], secret):
                        self._peers[peer] = int(hello["rank"])
                        continue
                peer.close()

    def _forget(self) -> None:
        """Close the connections in a forked child, which would otherwise keep them open after this rank has died."""
        for peer in self._peers:
            peer.close()

    def _watch(self) -> None:
        selector, rest = selectors.DefaultSelector(), dict.fromkeys(self._peers, b"")
        for peer, rank in self._peers.items():
            peer.setblocking(True)  # the timeout was for joining only; a rank may be silent for hours
            selector.register(peer, selectors.EVENT_READ, (peer, rank))
        while rest:
            for key, _ in selector.select():
                peer, rank = key.data
                try:
                    data = peer.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(peer)
                    del rest[peer]
                    # A rank that announced that it is done may close its connection; any other that does is dead.
                    if rank not in self._done:
                        self._hear({"lost": rank, "why": self._why.get(rank, _KILLED)}, peer)
                    continue
                *lines, rest[peer] = (rest[peer] + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line), peer)

    def _hear(self, message: dict[str, Any], source: socket.socket) -> None:
        """Take in a message about a rank; rank 0 forwards it to the others."""
        if self._index == 0:  # the other ranks have no connections among themselves
            self._tell(message, source)
        if "done" in message:
            self._done.add(message["done"])
            return
        final = "lost" in message
        rank = message["lost" if final else "ending"]
        # A reason that the rank gave before its connection broke takes precedence.
        self._why.setdefault(rank, message["why"])
        if rank == self._index:
            return
        if self._heard is None:
            self._heard = (rank, self._why[rank])
            self._news.set()
        if self._over:  # there is nothing to end, and an interpreter that shuts down may refuse to start a thread
            return
        timer = threading.Timer(self._grace, self._give_up, (final,))
        timer.daemon = True
        timer.start()

    def _tell(self, message: dict[str, Any], apart_from: socket.socket | None = None) -> None:
        with self._lock:
            for peer in self._peers:
                if peer is not apart_from:
                    with contextlib.suppress(OSError):
                        peer.sendall(_line(message))

    def _give_up(self, final: bool) -> None:
        """Exit this process, unless it is ending by itself; `final` says that the other rank's process is gone."""
        # A rank that is itself failing is left alone while the other rank lives: they may be saving together. Once the
        # other process is gone, that collective save will never return.
        if self._over or (self._own is not None and not final) or self._heard is None:
            return
        sentence = self._own or str(self._lost())
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {printable(sentence)}\n")
            sys.stderr.flush()
        os._exit(RankLostError.exit_code)  # the main thread hangs in a collective and would never see an exception

    def _lost(self) -> RankLostError:
        rank, why = self._heard or (0, _KILLED)
        return RankLostError(f"rank {rank} ended: {why.rstrip('.')}; the run continues from its last checkpoint.")

    def ending(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`; it may still save together with others that end too."""
        if self._own is None:
            self._own = str(error) if isinstance(error, OpdError) else f"{type(error).__name__}: {error}"
            self._tell({"ending": self._index, "why": self._own})

    def rename(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Exit callback that replaces a collective's error by the lost rank's; runs before those that report errors.

        Raises:
            RankLostError: in place of the collective's error.
        """
        # Collectives raise plain RuntimeErrors, as does much else. It was a collective's only if a rank was lost.
        of_collective = kind is not None and issubclass(kind, RuntimeError) and self._peers and self._own is None
        if of_collective and self._news.wait(_NEWS_SECONDS):
            raise self._lost() from error

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Exit callback: tell the other ranks how this one ends, after which they do not end it any more."""
        if error is not None and not isinstance(error, RankLostError):
            self.ending(error)
        self._tell({"done": self._index})
        self._over = True


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(peer: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 1000 and (data := peer.recv(1)):
        line += data
    return line


def _keep_alive(peer: socket.socket) -> None:
    """Have TCP keep-alive break the connection to a machine that is gone within half a minute."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
