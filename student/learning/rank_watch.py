"""Ranks that hear at once when one of them ends: each keeps a connection to rank 0, which forwards what it hears.

A collective notices a lost rank late and cannot name it: NCCL at its timeout, gloo in the next exchange. Here a rank
says why it ends, or its connection breaks, and every other rank ends with that rank's error: through its own exceptions
where it can (the error of a collective is replaced), and by exiting after a few seconds where it hangs in one.
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

GRACE_SECONDS = 3.0
"""Time for a rank to end by itself once another has ended."""
_NEWS_SECONDS = 2.0
"""Time to hear which rank ended, once a collective has failed."""
_JOIN_SECONDS = 60.0
_KILLED = "it said nothing, so it was killed, or its machine was lost"


class Exchange(Protocol):
    """What is needed of `Ranks`."""

    count: int
    index: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""


class RankWatch:
    """Watches the other ranks from a thread; does nothing in a run of one rank.

    Args:
        ranks: all ranks.
        grace: seconds for this rank to end by itself once another has ended.
    """

    def __init__(self, ranks: Exchange, grace: float = GRACE_SECONDS) -> None:
        self._index, self._grace = ranks.index, grace
        self._news = threading.Event()
        self._heard: tuple[int, str] | None = None  # the first rank that ended, and why
        self._own: str | None = None  # why this one ends
        self._over = False  # this one has left, and nothing ends it any more
        self._lock = threading.Lock()  # of what is sent: lines of two threads must not mix
        self._peers: dict[socket.socket, int] = {}
        self._why: dict[int, str] = {}
        self._done: set[int] = set()
        if ranks.count == 1:
            return
        # Any free port; only the ranks can know it and the secret, because a collective tells both.
        server = socket.create_server(("", 0)) if ranks.index == 0 else None
        told = (server.getsockname()[1], secrets.token_hex()) if server is not None else None
        port, secret = ranks.gather(told)[0]
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
                    # The port is open to the network: only a rank knows the secret, which went through a collective.
                    hello = json.loads(_read_line(peer))
                    if secrets.compare_digest(hello["secret"], secret):
                        self._peers[peer] = int(hello["rank"])
                        continue
                peer.close()

    def _forget(self) -> None:
        """In a forked child: a connection that it holds too would not break with this rank."""
        for peer in self._peers:
            peer.close()

    def _watch(self) -> None:
        selector, rest = selectors.DefaultSelector(), dict.fromkeys(self._peers, b"")
        for peer, rank in self._peers.items():
            peer.setblocking(True)  # the time limit was for joining: a rank may be silent for hours
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
                    # A rank that has said that it is done may close; all others that do are dead.
                    if rank not in self._done:
                        self._hear({"lost": rank, "why": self._why.get(rank, _KILLED)}, peer)
                    continue
                *lines, rest[peer] = (rest[peer] + data).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line), peer)

    def _hear(self, said: dict[str, Any], source: socket.socket) -> None:
        """Take what was said of a rank, and pass it on to the others."""
        if self._index == 0:  # the others have no connections among themselves
            self._tell(said, source)
        if "done" in said:
            self._done.add(said["done"])
            return
        final = "lost" in said
        rank = said["lost" if final else "ending"]
        # The reason that a rank gave before its connection broke is the better one.
        self._why.setdefault(rank, said["why"])
        if rank == self._index:
            return
        if self._heard is None:
            self._heard = (rank, self._why[rank])
            self._news.set()
        timer = threading.Timer(self._grace, self._give_up, (final,))
        timer.daemon = True
        timer.start()

    def _tell(self, said: dict[str, Any], apart_from: socket.socket | None = None) -> None:
        with self._lock:
            for peer in self._peers:
                if peer is not apart_from:
                    with contextlib.suppress(OSError):
                        peer.sendall(_line(said))

    def _give_up(self, final: bool) -> None:
        """End this process, unless it is ending by itself; what ends together may still be saving together."""
        # A rank that fails itself is left alone while the other one still lives: they may be in one last collective
        # save. Once that one is gone, the collective will never return.
        if self._over or (self._own is not None and not final) or self._heard is None:
            return
        sentence = self._own or str(self._lost())
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {sentence}\n")
            sys.stderr.flush()
        os._exit(RankLostError.exit_code)  # the main thread hangs in a collective and would not see an exception

    def _lost(self) -> RankLostError:
        rank, why = self._heard or (0, _KILLED)
        return RankLostError(f"rank {rank} ended: {why.rstrip('.')}; the run goes on from its last checkpoint.")

    def ending(self, error: BaseException) -> None:
        """Tell the others that this rank ends with `error`; it may still save together with others that end too."""
        if self._own is None:
            self._own = str(error) if isinstance(error, OpdError) else f"{type(error).__name__}: {error}"
            self._tell({"ending": self._index, "why": self._own})

    def rename(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Exit callback that runs before those that report an error: replaces a collective's error by the lost rank's.

        Raises:
            RankLostError: in place of the collective's error.
        """
        # torch raises plain RuntimeErrors for collectives, and so does much else: it is one only if news come in.
        of_collective = kind is not None and issubclass(kind, RuntimeError) and self._peers and self._own is None
        if of_collective and self._news.wait(_NEWS_SECONDS):
            raise self._lost() from error

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Exit callback: tell the others how this rank ends. From then on they no longer end it."""
        if error is not None and not isinstance(error, RankLostError):
            self.ending(error)
        self._tell({"done": self._index})
        self._over = True


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _read_line(peer: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n") and len(found) < 1000 and (data := peer.recv(1)):
        found += data
    return found


def _keep_alive(peer: socket.socket) -> None:
    """Make the connection to a machine that is gone break within half a minute."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
