"""Freed memory goes back to the operating system, and only where there is enough of it."""

import pytest

from teacher_server.observe import host


def test_memory_is_given_back_once_for_every_64_mib_that_were_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(host, "_TRIM", calls.append)
    mine, enough = host.Allocator(), host.ENOUGH_BYTES
    for freed in (0, enough - 1, enough, enough + 1, 2 * enough - 1, 5 * enough, 5 * enough):
        mine.give_back(freed)
    assert calls == [0, 0]


def test_a_c_library_without_the_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_TRIM", None)
    host.Allocator().give_back(host.ENOUGH_BYTES)
