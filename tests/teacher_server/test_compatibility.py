"""Old client with new server and back: by the descriptors of released versions, and of a version yet to come."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from opd.wire.bounds import RequestBounds
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb

GOLDEN = Path(__file__).resolve().parents[1] / "opd" / "wire" / "golden"
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())


def messages(file: descriptor_pb2.FileDescriptorProto) -> Any:
    """Message classes of a schema, apart from the ones generated for this version."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"opd.wire.v1.{name}"))


def released(version: str) -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto.FromString((GOLDEN / version / "teacher.desc").read_bytes())


def future() -> descriptor_pb2.FileDescriptorProto:
    """The present schema with a new field in every message and a new payload and message kind."""
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        message.field.add(name="later", number=900, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING, label=1)
    return file


async def ask(client: Any, of: Any, items: Any) -> list[Any]:
    """Score with the message classes of another version, read the answers with them, and re-encode them for ours."""
    request = of("ScoreRequest").FromString(
        build_score_request(items, PayloadSpec.topk(5), teacher="t", request_id="r").SerializeToString()
    )
    if "later" in request.DESCRIPTOR.fields_by_name:
        request.later = "unknown to you"
        request.sequences[0].later = "unknown to you"
    call = client.channel.unary_stream(
        "/opd.wire.v1.TeacherService/Score",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=of("ScoreResponse").FromString,
    )
    return [message async for message in call(request)]


@pytest.mark.parametrize("schema", [*VERSIONS, "future"])
async def test_a_client_of_another_version_is_served(schema: str, start: Any, items: Any) -> None:
    client = await start()
    of = messages(future() if schema == "future" else released(schema))
    asked = items(2)
    answers = await ask(client, of, asked)
    bounds = RequestBounds.from_info(await client.info())
    decoder = ScoreStreamDecoder(asked, PayloadSpec.topk(5), bounds, request_id="r")
    for answer in answers:
        decoder.feed(pb.ScoreResponse.FromString(answer.SerializeToString()))
    ours = await client.score(asked, PayloadSpec.topk(5))
    for theirs, own in zip(decoder.finish(), ours, strict=True):
        np.testing.assert_array_equal(theirs.values, own.values)
        np.testing.assert_array_equal(theirs.ids, own.ids)


async def test_a_later_server_is_understood(start: Any, items: Any) -> None:
    client = await start()
    of = messages(future())
    asked = items(2)
    bounds = RequestBounds.from_info(await client.info())
    decoder = ScoreStreamDecoder(asked, PayloadSpec.topk(5), bounds, request_id="r")
    for answer in await ask(client, of, asked):
        answer.later = "unknown to you"
        kind = answer.WhichOneof("message")
        getattr(answer, kind).later = "nor this"
        decoder.feed(pb.ScoreResponse.FromString(answer.SerializeToString()))
    assert len(decoder.finish()) == 2


async def test_a_payload_of_a_later_version_is_refused_by_name_not_by_crash(start: Any, items: Any) -> None:
    import grpc

    client = await start()
    request = build_score_request(items(1), PayloadSpec.sampled(), teacher="t", request_id="r")
    request.ClearField("sampled")
    unknown = request.SerializeToString() + b"\x4a\x00"  # field 9: a payload this server does not know
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in client.channel.unary_stream("/opd.wire.v1.TeacherService/Score")(unknown):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "payload" in caught.value.details()
