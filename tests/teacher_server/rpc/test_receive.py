"""A request that is received: counted before it is parsed, and in memory no more often than it must be."""

import asyncio
import tracemalloc
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.calls.caller import Caller
from teacher_server.observe.metrics import ServerMetrics
from teacher_server.rpc.receive import RequestReceiver, has_at_most
from teacher_server.settings import ServerSettings


def fields(message: pb.ScoreRequest) -> int:
    """Top-level fields on the wire: every set one once, repeated ones once per element."""
    return sum(len(value) if field.is_repeated else 1 for field, value in message.ListFields())


@given(
    sequences=st.lists(st.builds(pb.Sequence, token_ids=st.binary(max_size=300)), max_size=8),
    text=st.text(max_size=200),
    number=st.integers(0, 2**32 - 1),
)
def test_the_count_is_that_of_the_message(sequences: list[pb.Sequence], text: str, number: int) -> None:
    message = pb.ScoreRequest(request_id=text, sequences=sequences, temperature=0.5, chunk_bytes=number)
    data, count = message.SerializeToString(), fields(message)
    assert has_at_most(data, count)
    assert count == 0 or not has_at_most(data, count - 1)


@given(st.binary(max_size=60))
def test_no_bytes_that_pass_become_more_fields_than_allowed(data: bytes) -> None:
    if not has_at_most(data, 3):
        return
    try:
        message = pb.ScoreRequest.FromString(data)
    except DecodeError:
        return
    assert fields(message) <= 3


@pytest.mark.parametrize(
    ("data", "good"),
    [
        (b"", True),
        (b"\x1a\x00" * 3, True),
        (b"\x1a\x00" * 4, False),
        (b"\x1a\x00\x22", True),  # cut in a field: the parser refuses it
        (b"\x1a\xff\xff\xff\xff\x0f", True),  # longer than the message: the same
        (b"\x80" * 60, True),
        (b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", True),  # ten bytes are the longest number
        (b"\x0b" + b"\x1a\x00" * 50 + b"\x0c", False),  # a group hides its fields
        (b"\x0d\0\0\0\0\x09" + bytes(8), True),
    ],
)
def test_odd_bytes_are_left_to_the_parser_and_floods_are_not(data: bytes, good: bool) -> None:
    assert has_at_most(data, 3) is good


async def test_messages_that_arrive_at_once_are_held_as_bytes_or_parsed_but_not_both() -> None:
    size, count = 4 << 20, 6
    receiver = RequestReceiver(ServerSettings(), ServerMetrics())
    arrived = asyncio.Event()

    class Context:
        async def read(self) -> bytes:
            await arrived.wait()
            return b"\x0a\xfc\xff\xff\x01".ljust(size, b"x")  # one field

    async def receive(number: int) -> Any:
        return await receiver.receive(Context(), Caller("", f"caller {number}", authorised=True), bytearray)

    tracemalloc.start()
    try:
        calls = [asyncio.create_task(receive(number)) for number in range(count)]
        await asyncio.sleep(0)
        tracemalloc.reset_peak()
        arrived.set()
        parsed = await asyncio.gather(*calls)
        assert tracemalloc.get_traced_memory()[1] < (count + 2) * size
    finally:
        tracemalloc.stop()
    assert [len(message) for message in parsed] == [size] * count
