"""Golden bytes per schema version: what was once on the wire is still written the same way and still understood."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2

from opd.wire.bounds import RequestBounds
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.head import HeadStreamDecoder
from opd.wire.request import build_score_request, parse_score_request
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import admin_pb2
from opd.wire.v1 import teacher_pb2 as pb

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())
SPECS = {
    "sampled": PayloadSpec.sampled(),
    "topk_f16": PayloadSpec.topk(4),
    "topk_u16": PayloadSpec.topk(4, "u16"),
    "gather_f32": PayloadSpec.gather(3, "f32"),
    "hidden_bf16": PayloadSpec.hidden(),
    "full": PayloadSpec.full(),
}
BOUNDS = RequestBounds("t", 300, frozenset(PayloadKind), True, 64, 300, 4, 256, 1 << 20, 16)


def split(data: bytes) -> list[bytes]:
    parts = []
    while data:
        size = int.from_bytes(data[:4], "little")
        parts.append(data[4 : 4 + size])
        data = data[4 + size :]
    return parts


def load(version: str, name: str) -> tuple[list[ScoreItem], dict[str, Any]]:
    arrays = dict(np.load(GOLDEN / version / f"arrays_{name}.npz", allow_pickle=False))
    items = [
        ScoreItem(arrays[f"{i}.token_ids"], int(arrays[f"{i}.prompt_length"]), arrays.get(f"{i}.gather_ids"))
        for i in range(2)
    ]
    return items, arrays


both = pytest.mark.parametrize("version", VERSIONS)
each = pytest.mark.parametrize("name", SPECS)


@both
@each
def test_requests_are_built_to_the_byte_as_before(version: str, name: str) -> None:
    items, _ = load(version, name)
    message = build_score_request(
        items,
        SPECS[name],
        teacher="t",
        request_id="golden",
        temperature=0.5,
        expected_weights_hash="w" * 64,
        accept_zstd=True,
        chunk_bytes=65536,
        client="c",
    )
    golden = split((GOLDEN / version / f"request_{name}.bin").read_bytes())[0]
    assert message.SerializeToString(deterministic=True) == golden


@both
@each
def test_old_requests_are_parsed(version: str, name: str) -> None:
    items, _ = load(version, name)
    golden = split((GOLDEN / version / f"request_{name}.bin").read_bytes())[0]
    parsed = parse_score_request(pb.ScoreRequest.FromString(golden), BOUNDS)
    assert parsed.spec == SPECS[name]
    assert parsed.temperature == 0.5
    for got, want in zip(parsed.items, items, strict=True):
        assert (got.token_ids == want.token_ids).all()
        assert got.prompt_length == want.prompt_length
        assert want.gather_ids is None or (got.gather_ids == want.gather_ids).all()


@both
@each
def test_old_streams_are_decoded_to_the_same_numbers(version: str, name: str) -> None:
    items, arrays = load(version, name)
    decoder = ScoreStreamDecoder(items, SPECS[name], BOUNDS, request_id="golden", expected_weights_hash="w" * 64)
    for data in split((GOLDEN / version / f"scores_{name}.bin").read_bytes()):
        decoder.feed(pb.ScoreResponse.FromString(data))
    for index, scores in enumerate(decoder.finish()):
        assert scores.timings.total == 2.1
        for field in ("sampled", "ids", "log_tail", "hidden", "logits"):
            if f"{index}.{field}" in arrays:
                np.testing.assert_array_equal(getattr(scores, field), arrays[f"{index}.{field}"])
        if f"{index}.values" in arrays:
            exact = SPECS[name].value_dtype == "f32"
            np.testing.assert_allclose(scores.values, arrays[f"{index}.values"], atol=0 if exact else 8e-3)


@both
def test_an_old_head_stream_is_decoded(version: str) -> None:
    decoder = HeadStreamDecoder()
    for data in split((GOLDEN / version / "head.bin").read_bytes()):
        decoder.feed(pb.GetHeadResponse.FromString(data))
    head = decoder.finish()
    assert head.weight.shape == (10, 4)
    assert head.bias.shape == (10,)
    assert (head.dtype, head.logit_scale, head.soft_cap) == ("bf16", 0.5, 30.0)


def shape(proto: descriptor_pb2.FileDescriptorProto) -> dict[str, Any]:
    """What must not change: numbers, names, types and labels of fields, enum values and methods."""
    found: dict[str, Any] = {}
    for message in proto.message_type:
        for field in message.field:
            found[f"{message.name}.{field.number}"] = (field.name, field.type, field.label, field.type_name)
    for enum in proto.enum_type:
        for value in enum.value:
            found[f"{enum.name}.{value.number}"] = value.name
    for service in proto.service:
        for method in service.method:
            found[f"{service.name}.{method.name}"] = (
                method.input_type,
                method.output_type,
                method.client_streaming,
                method.server_streaming,
            )
    return found


def retired(old: descriptor_pb2.FileDescriptorProto, new: descriptor_pb2.FileDescriptorProto) -> set[str]:
    """Fields of `old` whose number and name `new` reserves, and the fields of messages that nothing names any more."""
    messages = {message.name: message for message in new.message_type}
    found = set()
    for message in old.message_type:
        later = messages.get(message.name)
        for field in message.field:
            by_number = later is None or any(r.start <= field.number < r.end for r in later.reserved_range)
            if by_number and (later is None or field.name in later.reserved_name):
                found.add(f"{message.name}.{field.number}")
    return found


@both
@pytest.mark.parametrize("module", [pb, admin_pb2], ids=["teacher", "admin"])
def test_the_schema_only_ever_grows_or_reserves_what_it_retires(version: str, module: Any) -> None:
    stem = Path(module.DESCRIPTOR.name).stem
    old = descriptor_pb2.FileDescriptorProto.FromString((GOLDEN / version / f"{stem}.desc").read_bytes())
    new = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(new)
    present, gone = shape(new), retired(old, new)
    changed = {key: value for key, value in shape(old).items() if present.get(key) != value and key not in gone}
    assert changed == {}
    assert gone & set(present) == set()
