"""Teachers are administered over the wire, by callers whose token allows it."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from opd.wire.v1 import admin_pb2 as admin
from opd.wire.v1 import admin_pb2_grpc


async def test_admin_calls_are_refused_without_tokens(start: Any) -> None:
    client = await start()
    stub = admin_pb2_grpc.AdminServiceStub(client.channel)
    for call in (
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="x", model="y")),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="t")),
        stub.SleepTeacher(admin.SleepTeacherRequest(teacher="t")),
        stub.WakeTeacher(admin.WakeTeacherRequest(teacher="t")),
        stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="t", folder="/x")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(list(client.server.shared.teachers)) == 1


async def test_an_operator_administers_over_the_wire(
    start: Any, items: Any, tmp_path: Path, operator: Any, weights: Any
) -> None:
    client, stub, meta = await operator(tmp_path)
    loaded = await stub.LoadTeacher(admin.LoadTeacherRequest(teacher="u", model="m"), metadata=meta)
    assert loaded.teacher.name == "u"
    await stub.SleepTeacher(admin.SleepTeacherRequest(teacher="u"), metadata=meta)
    assert client.engines["m"].asleep
    await stub.WakeTeacher(admin.WakeTeacherRequest(teacher="u"), metadata=meta)
    assert not client.engines["m"].asleep
    folder = weights(tmp_path / "w", 9)
    swapped = await stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="u", folder=str(folder)), metadata=meta)
    assert swapped.weights_hash == client.engines["m"].info.weights_hash
    bad = [
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="a b", model="m"), metadata=meta),
        stub.LoadTeacher(admin.LoadTeacherRequest(teacher="v"), metadata=meta),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=-1), metadata=meta),
        stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=float("nan")), metadata=meta),
        stub.UpdateWeights(admin.UpdateWeightsRequest(teacher="u", folder="a\0b"), metadata=meta),
    ]
    for call in bad:
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await stub.UnloadTeacher(admin.UnloadTeacherRequest(teacher="u", grace_seconds=1), metadata=meta)
    assert len(list(client.server.shared.teachers)) == 1
