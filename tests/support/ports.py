"""Ports that a test gives to servers: known before a server starts, and the same after it has been started anew."""

import socket

_HELD: list[socket.socket] = []


def held_port(host: str = "127.0.0.1") -> int:
    """A free port that stays this test process' own until it ends.

    A socket is bound to it and never listens: the system gives the port to no other process, refuses connections to it,
    and a server may listen on it, because both sides allow the address to be used again.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    placeholder = socket.socket(family, socket.SOCK_STREAM)
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    placeholder.bind((host, 0))
    _HELD.append(placeholder)
    return int(placeholder.getsockname()[1])


def listens(host: str, port: int) -> bool:
    """Whether a server takes connections there."""
    try:
        socket.create_connection((host, port), 120).close()
    except ConnectionRefusedError:
        return False
    return True
