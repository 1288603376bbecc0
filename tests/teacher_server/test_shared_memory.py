"""The shared-memory path: used when it helps, never in the way, nothing left behind."""

import os
from pathlib import Path
from typing import Any

import pytest

from opd.errors import CorruptPayloadError
from opd.wire import shm
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.shared_memory import SharedMemory

ON = {"shared_memory": True}


def mine(token: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"opd-{token.rpartition(':')[2]}*"))


def lent(memory: SharedMemory) -> list[str]:
    """Names of the segments that readers have not unlinked."""
    memory.sweep()
    return [segment.lent for segment in memory._segments if segment.lent]


async def test_large_sequences_travel_through_shared_memory_and_are_equal(start: Any, items: Any) -> None:
    client = await start(transport=ON)
    token = client.server.shared.memory.token
    assert shm.shared_memory_available(token)
    asked = items(3, rows=1000)
    both = []
    for spec in (PayloadSpec.topk(60), PayloadSpec.full()):
        plain = await client.score(asked, spec)
        shared = await client.score(asked, spec, shared_memory_token=token)
        both.append((plain, shared))
        for a, b in zip(plain, shared, strict=True):
            for name in ("sampled", "values", "ids", "log_tail", "logits"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x is None and y is None) or (x == y).all()
            assert b.values is None or b.values.flags.writeable
    sent = {
        path: sum(v.wire_bytes for v in got) for path, got in zip(("chunks", "shared_memory"), both[0], strict=True)
    }
    rows = sum(item.response_length for item in asked)
    assert sent["shared_memory"] - sent["chunks"] == rows * 60 * 4 - rows * 60 * 18 // 8  # ids of 32 and of 18 bits
    full = sum(scores.wire_bytes for scores in both[1][0])
    for path, size in sent.items():
        assert client.server.shared.metrics.sent_bytes.labels("t", path)._value.get() == size + full
    assert lent(client.server.shared.memory) == []
    assert len(mine(token)) == 1 + len(client.server.shared.memory._segments)  # the marker and what is used again


async def test_ids_are_packed_for_other_hosts_unless_the_operator_says_otherwise(start: Any, items: Any) -> None:
    sizes = []
    for pack in (True, False):
        client = await start(transport={"pack_ids": pack})
        sizes.append(sum(scores.wire_bytes for scores in await client.score(items(2, rows=8), PayloadSpec.topk(4))))
    assert sizes == [2 * 8 * (4 * 2 + 8) + 2 * 8 * 4 * 18 // 8, 2 * 8 * (4 * 2 + 8) + 2 * 8 * 4 * 4]


async def test_small_sequences_and_full_memory_fall_back_to_chunks(start: Any, items: Any) -> None:
    client = await start(transport={"shared_memory": True, "shared_memory_bytes": 70_000})
    token = client.server.shared.memory.token
    await client.score(items(2), PayloadSpec.topk(9), shared_memory_token=token)
    await client.score(items(2, rows=4000), PayloadSpec.topk(90), shared_memory_token=token)
    assert client.server.shared.metrics.sent_bytes.labels("t", "shared_memory")._value.get() == 0


async def test_a_wrong_token_is_ignored(start: Any, items: Any) -> None:
    client = await start(transport=ON)
    results = await client.score(items(1, rows=1000), PayloadSpec.topk(60), shared_memory_token="boot:1:abc")
    assert len(results) == 1
    assert client.server.shared.metrics.sent_bytes.labels("t", "shared_memory")._value.get() == 0


async def test_segments_of_a_cancelled_call_are_unlinked(start: Any, items: Any) -> None:
    client = await start(transport=ON)
    token = client.server.shared.memory.token
    message = build_score_request(
        items(3, rows=1000), PayloadSpec.topk(60), teacher="t", request_id="r", shared_memory_token=token
    )
    never = __import__("asyncio").Event()
    client.server.shared.faults.set("before_trailer", never.wait)
    call = client.stub.Score(message)
    while (await call.read()).WhichOneof("message") != "sequence":
        pass
    assert len(mine(token)) > 1
    call.cancel()
    await client.settled()
    assert len(mine(token)) == 1
    await client.server.close()
    assert mine(token) == []


def test_the_token_is_recognised_only_where_the_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(1 << 20)
    try:
        assert shm.shared_memory_available(memory.token)
        boot, device, nonce = memory.token.split(":")
        other = "0" * 32
        for token in ("", "x", f"{boot}:{device}:{other}", f"{boot}:9{device}:{nonce}", f"other:{device}:{nonce}"):
            assert not shm.shared_memory_available(token)
        assert not shm.shared_memory_available(f"{boot}:{device}:../etc/passwd")
        monkeypatch.setattr(shm, "host_identity", lambda: "other:1")
        assert not shm.shared_memory_available(memory.token)
    finally:
        memory.close()


def put(memory: SharedMemory, data: bytes) -> list[pb.SharedTensor] | None:
    segment = memory.claim(len(data))
    return None if segment is None else memory.fill(segment, [memoryview(data)])


def test_segments_that_were_read_are_used_again_and_others_never(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(1 << 20)
    try:
        first, second = put(memory, b"x" * 5000), put(memory, b"y" * 5000)
        assert first[0].name != second[0].name
        assert bytes(shm.take([(first[0].name, 0, 5000)])[0]) == b"x" * 5000
        used = memory.used_bytes
        third = put(memory, b"z" * 4800)
        assert memory.used_bytes == used and third[0].name not in (first[0].name, second[0].name)
        assert bytes(shm.take([(second[0].name, 0, 5000)])[0]) == b"y" * 5000
        assert bytes(shm.take([(third[0].name, 0, 4800)])[0]) == b"z" * 4800
        with pytest.raises(CorruptPayloadError, match="cannot be opened"):
            shm.take([(first[0].name, 0, 5000)])
    finally:
        memory.close()
    assert mine(f":{memory._prefix.removeprefix('opd-')}") == []


def test_a_reader_gives_a_segment_back_only_after_it_has_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(1 << 20)
    try:
        places = [put(memory, bytes([n]) * 5000)[0].name for n in (1, 2)]
        read, seen = os.preadv, []

        def slow(*args: Any) -> int:
            seen.append(len(lent(memory)))
            return read(*args)

        monkeypatch.setattr(os, "preadv", slow)
        shm.take([(name, 0, 5000) for name in places])
        assert seen == [2, 2] and lent(memory) == []
    finally:
        memory.close()


def test_segments_that_nobody_reads_hold_no_descriptor() -> None:
    memory = SharedMemory(1 << 20)
    try:
        before = len(os.listdir("/proc/self/fd"))
        assert all(put(memory, bytes(5000)) for _ in range(9))
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        memory.close()


def test_a_segment_that_is_being_filled_is_not_taken_for_read() -> None:
    memory = SharedMemory(1 << 20)
    try:
        place = put(memory, b"x" * 5000)[0]
        shm.take([(place.name, 0, 5000)])
        claimed = memory.claim(5000)
        memory.sweep()
        assert memory.claim(5000) is not claimed
        assert claimed.lent
    finally:
        memory.close()


def test_a_reader_that_is_still_copying_when_its_call_ends_keeps_its_bytes() -> None:
    memory = SharedMemory(1 << 20)
    try:
        place = put(memory, b"x" * 5000)[0]
        with (shm.SHM_ROOT / place.name).open("rb") as reader:
            memory.discard(place.name)
            put(memory, b"y" * 5000)
            assert reader.read(5000) == b"x" * 5000
        assert len(mine(memory.token)) == 3  # the marker, and the two names of the second segment
    finally:
        memory.close()


def test_a_segment_dropped_while_it_is_filled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(1 << 20)
    try:
        segment = memory.claim(5000)
        link = os.link

        def late(*names: Any) -> None:
            memory.discard(segment.lent)
            link(*names)

        monkeypatch.setattr(os, "link", late)
        before = len(os.listdir("/proc/self/fd"))
        assert memory.fill(segment, [memoryview(bytes(5000))]) is None
        assert len(os.listdir("/proc/self/fd")) == before
        assert len(mine(memory.token)) == 1
        dropped = memory.claim(5000)
        memory.discard(dropped.lent)
        assert memory.fill(dropped, [memoryview(bytes(5000))]) is None
        assert len(mine(memory.token)) == 1
    finally:
        memory.close()


def test_old_segments_are_swept_and_idle_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(100_000)
    try:
        place = put(memory, bytes(60_000))[0]
        assert put(memory, bytes(60_000)) is None  # no room
        shm.take([(place.name, 0, 60_000)])
        assert put(memory, bytes(5000)) is not None  # far smaller: a segment of its own
        assert put(memory, bytes(80_000)) is not None  # in the place of the one that is idle
        monkeypatch.setattr("teacher_server.shared_memory.IDLE_SECONDS", -1.0)
        monkeypatch.setattr("teacher_server.shared_memory.LIFETIME_SECONDS", -1.0)
        memory.sweep()
        assert memory.used_bytes == 0
        assert len(mine(memory.token)) == 1
        assert put(memory, bytes(2 << 20)) is None
    finally:
        memory.close()


def test_a_full_tmpfs_means_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(1 << 20)
    try:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert put(memory, bytes(5000)) is None
        monkeypatch.undo()
        assert len(mine(memory.token)) == 1
        assert put(memory, bytes(5000)) is not None
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("../../etc/passwd", "not one a server makes"),
        ("opd-" + "0" * 32, "not one a server makes"),
        ("opd-" + "0" * 32 + "-1", "cannot be opened"),
        ("/etc/passwd", "not one a server makes"),
        ("", "not one a server makes"),
    ],
)
def test_a_lying_server_cannot_make_the_client_open_other_files(name: str, text: str) -> None:
    with pytest.raises(CorruptPayloadError, match=text):
        shm.take([(name, 0, 1)])


def test_links_and_short_segments_are_refused(tmp_path: Path) -> None:
    memory = SharedMemory(1 << 20)
    target = tmp_path / "secret"
    target.write_text("secret")
    link = Path("/dev/shm") / (memory._prefix + "-77")
    try:
        link.symlink_to(target)
        with pytest.raises(CorruptPayloadError, match="cannot be opened"):
            shm.take([(link.name, 0, 3)])
        assert target.exists()
        place = put(memory, b"abc")[0]
        with pytest.raises(CorruptPayloadError, match="shorter"):
            shm.take([(place.name, 1, 4096)])
    finally:
        link.unlink(missing_ok=True)
        memory.close()


def test_shared_memory_that_was_not_offered_is_off() -> None:
    memory = SharedMemory(0)
    assert memory.token == ""
    assert put(memory, b"x") is None
    assert pb.GetLoadResponse().shared_memory_token == ""
    memory.close()


def test_the_next_server_removes_what_a_dead_one_and_its_janitor_left() -> None:
    alive = SharedMemory(1 << 20)
    left = [Path("/dev/shm") / ("opd-" + "e" * 32), Path("/dev/shm") / ("opd-" + "e" * 32 + "-1")]
    foreign = Path("/dev/shm/opd-not-ours")
    try:
        for path in (*left, foreign):
            path.write_bytes(b"x")
        place = put(alive, b"abc")[0]
        SharedMemory(1 << 20).close()
        assert not any(path.exists() for path in left)
        assert foreign.exists()
        assert bytes(shm.take([(place.name, 0, 3)])[0]) == b"abc"
        assert shm.shared_memory_available(alive.token)
    finally:
        foreign.unlink()
        alive.close()
