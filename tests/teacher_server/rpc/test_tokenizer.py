"""GetTokenizer: a teacher's tokenizer is sent if it can be, and if it is the one asked for."""

import zlib
from typing import Any

import grpc
import pytest

from opd.errors import IncompatibleTeacherError, InvalidRequestError, OpdError, TeacherNotFoundError
from opd.wire.status import error_from_rpc
from opd.wire.tokenizer import TokenizerStreamDecoder
from opd.wire.v1 import teacher_pb2 as pb


async def failure(client: Any, **asked: Any) -> OpdError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in client.stub.GetTokenizer(pb.GetTokenizerRequest(**asked)):
            pass
    return error_from_rpc(caught.value)


async def test_a_tokenizer_that_cannot_be_sent_is_refused(start: Any) -> None:
    client = await start()
    error = await failure(client, teacher="t")
    assert type(error) is IncompatibleTeacherError and "no tokenizer that can be sent" in str(error)
    assert type(await failure(client, teacher="u")) is TeacherNotFoundError
    assert type(await failure(client, teacher="t", chunk_bytes=1)) is InvalidRequestError
    await client.settled()


async def test_a_tokenizer_is_sent_if_it_is_the_one_asked_for(
    start: Any, numpy_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numpy_engine, "DOCUMENT", zlib.compress(b"{}"))
    client = await start()
    decoder = TokenizerStreamDecoder("f" * 64)
    asked = pb.GetTokenizerRequest(teacher="t", expected_fingerprint="f" * 64)
    async for message in client.stub.GetTokenizer(asked):
        decoder.feed(message)
    assert decoder.finish() == numpy_engine.DOCUMENT
    error = await failure(client, teacher="t", expected_fingerprint="g")
    assert type(error) is IncompatibleTeacherError and "call Describe again" in str(error)
    await client.settled()
