"""A connection that is cut ends the call under way, and makes no other."""

import socket
from typing import Any

import pytest

from student.rollout.servers.http import Connection, LostError


def test_a_connection_that_was_cut_between_two_calls_makes_no_other(start: Any) -> None:
    server = start()
    connection = Connection(server.url, None, 60.0)
    assert connection.call("/model_info") == {"weight_version": "default"}
    connection.close()  # as after an answer with which the server closes
    connection.cut()
    with pytest.raises(LostError, match="cut"):
        connection.call("/model_info")
    assert len(server.asked) == 1


def test_a_connection_that_was_cut_is_not_opened_again() -> None:
    """A host that drops what it is sent would hold the row for as long as a connection may take."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 60.0)
        connection.cut()
        with pytest.raises(LostError, match="cut"):
            connection.call("/model_info")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
