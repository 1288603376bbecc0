"""Servers that lie: every corrupt or wrong answer is noticed, and poisons nothing."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleet_cases import SPEC, calm, numbers, reason_of, state_of, tracebacks, wait_for_all, with_calls, with_health
from waiting import PATIENCE

from opd.errors import (
    CorruptPayloadError,
)
from opd.fleet.client import TeacherFleet
from opd.wire.checksum import crc32c
from opd.wire.tensors import pack_u18, unpack_u18
from opd.wire.v1 import teacher_pb2 as pb


def _flip_a_bit(messages: list[pb.ScoreResponse]) -> list[pb.ScoreResponse]:
    chunk = next(m for m in messages if m.HasField("chunk")).chunk
    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
    return messages


def _edit(role: int, change: Callable[[np.ndarray], None], dtype: str) -> Callable[[list[Any]], list[Any]]:
    """Change a tensor of the first sequence and put the right checksum on it: a lie, not noise."""

    def mangle(messages: list[pb.ScoreResponse]) -> list[pb.ScoreResponse]:
        header = next(m for m in messages if m.HasField("sequence")).sequence
        chunk = next(m for m in messages if m.HasField("chunk")).chunk
        data, start = bytearray(chunk.data), 0
        for tensor in header.tensors:
            if tensor.role == role:
                piece = np.frombuffer(bytes(data[start : start + tensor.byte_length]), dtype).copy()
                change(piece)
                data[start : start + tensor.byte_length] = piece.tobytes()
                tensor.crc32c = crc32c(piece.tobytes())
            start += tensor.byte_length
        chunk.data = bytes(data)
        return messages

    return mangle


def _set(value: float, index: int = 0) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[index] = value

    return change


def _edit_ids(change: Callable[[np.ndarray], None]) -> Callable[[list[Any]], list[Any]]:
    """Change the unpacked top-k ids of the first sequence, packed again under the right checksum."""

    def edit(packed: np.ndarray) -> None:
        ids = unpack_u18(packed, packed.size * 8 // 18)
        change(ids)
        packed[:] = pack_u18(ids)[: packed.size]

    return _edit(pb.TENSOR_ROLE_IDS, edit, "<u1")


def _wrong_rows(messages: list[pb.ScoreResponse]) -> list[pb.ScoreResponse]:
    next(m for m in messages if m.HasField("sequence")).sequence.tensors[0].rows += 1
    return messages


def _wrong_ids_crc(messages: list[pb.ScoreResponse]) -> list[pb.ScoreResponse]:
    next(m for m in messages if m.HasField("sequence")).sequence.ids_crc32c ^= 1
    return messages


def _wrong_weights(messages: list[pb.ScoreResponse]) -> list[pb.ScoreResponse]:
    messages[0].header.weights_hash = "0" * 64
    return messages


LIES = {
    "a flipped bit": _flip_a_bit,
    "NaN": _edit(pb.TENSOR_ROLE_SAMPLED, _set(float("nan")), "<f4"),
    "a positive log-prob": _edit(pb.TENSOR_ROLE_SAMPLED, _set(0.5), "<f4"),
    "probabilities that sum to more than one": _edit(pb.TENSOR_ROLE_LOG_TAIL, _set(0.0), "<f4"),
    "unsorted values": _edit(pb.TENSOR_ROLE_VALUES, _set(-9.0), "<f2"),
    "an id outside the vocabulary": _edit_ids(_set(99_999)),
    "an id twice": _edit_ids(lambda ids: ids.__setitem__(1, ids[0])),
    "a wrong number of rows": _wrong_rows,
    "scores of other ids": _wrong_ids_crc,
    "scores of other weights": _wrong_weights,
    "a missing trailer": lambda messages: messages[:-1],
    "a missing sequence": lambda messages: messages[:1] + messages[-1:],
    "no header": lambda messages: messages[1:],
    "nothing": lambda messages: [],
    "two trailers": lambda messages: [*messages, messages[-1]],
    "bytes that are not a message": lambda messages: [messages[0], b"\xff" * 40],
    "a message larger than the transport allows": lambda messages: [messages[0], b"\x00" * (65 << 20)],
}


WORDS = {
    "an id outside the vocabulary": "outside the vocabulary",
    "an id twice": "listed twice",
    "probabilities that sum to more than one": "add up",
    "unsorted values": "descending",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_is_given_up_and_poisons_nothing(
    tiny: SimpleNamespace, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest, liar = tiny.serve(), tiny.serve()
    liar.mangle = LIES[lie]
    items = tiny.items(60)
    settings = with_health(tiny.settings, cool_off_seconds=10 * PATIENCE)
    with TeacherFleet.connect([liar.address, honest.address], settings=settings) as fleet:
        wait_for_all(fleet, liar, honest)

        def given_up() -> bool:
            assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
            return state_of(fleet, liar.address) == "dead"

        tiny.wait_until(given_up)
        assert liar.requests
        assert WORDS.get(lie, "corrupt answer") in reason_of(fleet, liar.address)
        assert fleet.status().counters.corrupt_payloads >= 1
    assert not tracebacks(caplog), "a lie is the server's fault, not a bug of ours"


@pytest.mark.parametrize("method", ["Describe", "GetLoad"])
def test_a_server_whose_description_is_no_message_is_left_out_without_a_traceback(
    tiny: SimpleNamespace, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest, broken = tiny.serve(), tiny.serve()
    setattr(broken, method, lambda request, context: b"\xff" * 40)
    with TeacherFleet.connect([broken.address, honest.address], settings=tiny.settings) as fleet:
        items = tiny.items(10)
        assert numbers(fleet.score("math", items, SPEC)) == calm(tiny, items)
        tiny.wait_until(lambda: "not a message" in str(fleet._core.monitors[broken.address].error))
    assert not tracebacks(caplog)


def test_when_everybody_lies_the_call_fails_with_the_reason(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    server.mangle = LIES["NaN"]
    settings = with_calls(tiny.settings, attempts=2)
    with (
        TeacherFleet.connect(server.address, settings=settings) as fleet,
        pytest.raises(CorruptPayloadError, match=r"failed 2 times.*sampled"),
    ):
        fleet.score("math", tiny.items(1), SPEC)
