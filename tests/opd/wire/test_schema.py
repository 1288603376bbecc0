"""The schema itself: hot messages carry bytes, and the committed stubs are those of the protos."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from opd.wire.v1 import teacher_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
NUMERIC = {
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
    FieldDescriptor.CPPTYPE_FLOAT,
    FieldDescriptor.CPPTYPE_DOUBLE,
    FieldDescriptor.CPPTYPE_ENUM,
    FieldDescriptor.CPPTYPE_BOOL,
}


def reachable(root: Descriptor, seen: dict[str, Descriptor]) -> dict[str, Descriptor]:
    if root.full_name not in seen:
        seen[root.full_name] = root
        for field in root.fields:
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def repeated_numbers(*roots: Descriptor) -> list[str]:
    seen: dict[str, Descriptor] = {}
    for root in roots:
        reachable(root, seen)
    return [
        field.full_name
        for message in seen.values()
        for field in message.fields
        if field.is_repeated and field.cpp_type in NUMERIC
    ]


def test_no_hot_message_has_a_repeated_numeric_field() -> None:
    hot = (pb.ScoreRequest, pb.ScoreResponse, pb.GetHeadResponse)
    assert repeated_numbers(*(message.DESCRIPTOR for message in hot)) == []


def test_the_search_finds_repeated_numbers_where_there_are_some() -> None:
    found = repeated_numbers(pb.DescribeResponse.DESCRIPTOR)
    assert found == ["opd.wire.v1.TeacherInfo.payloads", "opd.wire.v1.TeacherInfo.stop_token_ids"]


def test_the_committed_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    spec: Any = importlib.util.spec_from_file_location("protos_script", ROOT / "scripts" / "protos.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.generate(tmp_path)
    fresh = {f.name: f.read_bytes() for f in (tmp_path / "opd" / "wire" / "v1").iterdir()}
    committed = {f.name: f.read_bytes() for f in (ROOT / "opd" / "wire" / "v1").glob("*_pb2*") if f.is_file()}
    assert fresh == committed, "run `make protos` and commit the result"
