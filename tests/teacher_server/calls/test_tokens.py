"""The file of tokens: what it may hold, when it is read again, and what a damaged one changes."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from opd.errors import AuthError, ConfigError, ScopeError
from opd.wire.channel import ClientSecurity
from opd.wire.types import PayloadSpec
from teacher_server.calls import tokens as security
from teacher_server.calls.tokens import Tokens

SAMPLED = PayloadSpec.sampled()


def write_tokens(path: Path, text: str) -> Path:
    path.write_text(text)
    # Coarse file clocks must not hide a change.
    os.utime(path, ns=(time.time_ns(), time.time_ns()))
    return path


def test_tokens_that_are_replaced_while_the_server_starts_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "tokens.yaml", security._read_tokens
    path.write_text("- {name: old, token: a-long-random-string-1}\n")

    def read_and_replace(place: Path) -> Any:
        found = read(place)
        (tmp_path / "next").write_text("- {name: new, token: a-long-random-string-2}\n")
        (tmp_path / "next").replace(path)
        return found

    monkeypatch.setattr(security, "_read_tokens", read_and_replace)
    tokens = Tokens(path)
    monkeypatch.setattr(security, "_read_tokens", read)
    tokens.reload()
    metadata = (("authorization", "Bearer a-long-random-string-2"),)
    assert tokens.authenticate(metadata, "score").name == "new"


def test_tokens_reload_when_the_file_changes_and_stay_when_it_breaks(
    tmp_path: Path, log_text: Callable[[], str]
) -> None:
    path = write_tokens(tmp_path / "t.yaml", "- {name: a, token: first-secret-123}\n")
    tokens = Tokens(path)
    old, new = [("authorization", f"Bearer {n}-secret-123") for n in ("first", "second")]
    assert tokens.authenticate([old], "score").name == "a"
    write_tokens(path, "- {name: b, token: second-secret-123}\n")
    tokens.reload()
    assert tokens.authenticate([new], "score").name == "b"
    with pytest.raises(AuthError):
        tokens.authenticate([old], "score")
    write_tokens(path, "not: [a list")
    for refused in (1, 2):
        for _ in range(3):
            tokens.reload()
        assert tokens.authenticate([new], "score").name == "b"
        assert log_text().count("token file refused") == refused
        path.unlink(missing_ok=True)
    assert "No such file" in log_text()


async def test_a_running_server_reads_new_tokens_and_never_in_the_way_of_its_calls(
    start: Any, items: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, secret = write_tokens(tmp_path / "t.yaml", "- {name: a, token: first-secret-123}\n"), tmp_path / "secret"
    secret.write_text("first-secret-123")
    client = await start(security=ClientSecurity(token_file=secret), security_={"tokens": path})
    reading, go_on, read = threading.Event(), threading.Event(), security._read_tokens

    def slowly(place: Path) -> Any:
        reading.set()
        go_on.wait(120)
        return read(place)

    monkeypatch.setattr(security, "_read_tokens", slowly)
    write_tokens(path, "- {name: b, token: second-secret-123}\n")
    await until(reading.is_set)
    assert len(await client.score(items(1), SAMPLED)) == 1
    go_on.set()
    secret.write_text("second-secret-123")
    await until(lambda: client.server._tokens._entries[0][1].name == "b")
    assert len(await client.score(items(1), SAMPLED)) == 1


DAMAGED = {
    "a date that does not exist": "- {name: a, token: 2024-13-45}",
    "a lone surrogate": '- {name: a, token: "\\ud800-long-enough-secret"}',
    "a surrogate as a name": '- {name: "\\ud800", token: long-enough-secret}',
    "nesting without end": "[" * 800,
    "a number of 5,000 digits": "- {name: a, sha256: " + "9" * 5000 + "}",
    "a hash that is a list": "- {name: a, sha256: [[long-enough-secret]]}",
    "a name that is a list": "- {name: [a], token: long-enough-secret}",
    "bytes that are not text": b"\xff\xfe- {name: a, token: long-enough-secret}",
    "a zero byte": "- {name: a, token: long-enough\0secret}",
    "an unknown tag": "- !!python/object:os.system {name: a, token: long-enough-secret}",
    "two documents": "- {name: a, token: long-enough-secret}\n---\n- 5",
    "an alias of itself": "- &a [*a]",
    "another file altogether": "x" * (2 << 20),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_token_file_leaves_the_tokens_as_they_were(kind: str, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.yaml", "- {name: a, token: first-secret-123}\n")
    tokens, text = Tokens(path), DAMAGED[kind]
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        Tokens(path)
    assert "long-enough" not in str(caught.value)
    tokens.reload()
    assert tokens.authenticate([("authorization", "Bearer first-secret-123")], "score").name == "a"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: b",
        "[]",
        "- 5",
        "- {token: long-enough-secret}",
        "- {name: a}",
        "- {name: a, token: short}",
        "- {name: a, token: 12345678901234567890}",
        "- {name: a, sha256: xyz}",
        "- {name: a, token: long-enough-secret, sha256: ab}",
        "- {name: a, token: long-enough-secret, scopes: [root]}",
        "- {name: a, token: long-enough-secret, scopes: [[score]]}",
        "- {name: a, token: long-enough-secret, scope: [admin]}",
        "- {name: a, token: 'long-enough-secret",
    ],
)
def test_a_malformed_token_file_is_refused_without_quoting_a_secret(text: str, tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "t.yaml", text)
    with pytest.raises(ConfigError) as caught:
        Tokens(path)
    assert "long-enough" not in str(caught.value)


def test_a_server_without_tokens_never_grants_admin() -> None:
    with pytest.raises(ScopeError):
        Tokens(None).authenticate((), "admin")
