"""Tokenizers of teachers: a server that is too old to send one is named."""

from types import SimpleNamespace

import pytest

from opd.errors import IncompatibleTeacherError
from opd.fleet.client import TeacherFleet
from opd.fleet.record.store import ScoreStore


def test_a_server_that_does_not_know_the_call_is_refused_by_name(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    with (
        TeacherFleet.connect(server.address, settings=tiny.settings) as fleet,
        pytest.raises(IncompatibleTeacherError, match=f"{server.address} does not know this call.*update the server"),
    ):
        fleet.tokenizer("math")


def test_a_store_keeps_tokenizers_by_fingerprint(tmp_path: object) -> None:
    store = ScoreStore(str(tmp_path))
    assert store.tokenizer("f" * 64) == b""
    store.put_tokenizer("f" * 64, b"document")
    assert store.tokenizer("f" * 64) == b"document"
