"""Tells systemd, or another supervisor that gave NOTIFY_SOCKET, what the server does: the protocol of sd_notify(3)."""

import contextlib
import os
import socket


def notify(**fields: str | int) -> None:
    """Send fields to the supervisor, such as READY=1; does nothing if there is none, or if it does not listen."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    text = "\n".join(f"{name}={value}" for name, value in fields.items())
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        # A name that begins with @ is in the abstract namespace, where it begins with a null byte.
        to.sendto(text.encode(), "\0" + path[1:] if path.startswith("@") else path)
