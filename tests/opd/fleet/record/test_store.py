import contextlib
import signal
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from forked import Program, finish
from safetensors.numpy import save
from waiting import wait_until

from opd.errors import ConfigError, DataError, RunFolderError, TeacherNotFoundError
from opd.fleet.client import TeacherFleet
from opd.fleet.record.row import StoredRow, from_bytes, score_key, to_bytes
from opd.fleet.record.store import ScoreStore
from opd.fleet.settings import CacheSettings
from opd.wire.checksum import crc32c
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

SPECS = [PayloadSpec.sampled(), PayloadSpec.topk(4), PayloadSpec.gather(3, "f32"), PayloadSpec.hidden("f32")]


def raw(scores: Scores) -> list[bytes]:
    names = ("sampled", "values", "ids", "log_tail", "hidden")
    return [b"" if getattr(scores, name) is None else getattr(scores, name).tobytes() for name in names]


def caching(tiny: SimpleNamespace, folder: Path, max_bytes: int = 0) -> object:
    return tiny.settings.model_copy(update={"cache": CacheSettings(folder=folder, max_bytes=max_bytes)})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_cached_rows_are_equal_and_are_not_sent_again(tiny: SimpleNamespace, tmp_path: Path, spec: PayloadSpec) -> None:
    server = tiny.serve()
    items = tiny.items(8, gather=3 if spec.kind.value == "gather" else 0)
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        first = fleet.score("math", items, spec)
    sent = server.scored_rows()
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        again = fleet.score("math", items, spec)
    assert sent == 8 and server.scored_rows() == 8
    assert [raw(s) for s in first] == [raw(s) for s in again]
    assert {s.weights_hash for s in again} == {server.models["math"].weights_hash}


def test_equal_weights_in_another_compute_dtype_are_not_answered_from_the_cache(
    tiny: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, items = tiny.serve(), tiny.items(3)
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        fleet.score("math", items, PayloadSpec.sampled())
    info = server.info("math")
    info.compute_dtype = pb.DTYPE_BF16
    monkeypatch.setattr(server, "info", lambda name: info)
    for _ in range(2):
        with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
            fleet.score("math", items, PayloadSpec.sampled())
            fleet.score("math", items, PayloadSpec.sampled())
    assert server.scored_rows() == 15
    assert sum("as computed in DTYPE_F32" in record.message for record in caplog.records) == 2


def test_rows_that_come_right_after_an_adoption_are_not_answered_by_the_weights_before(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    server, items, spec = tiny.serve(), tiny.items(3), PayloadSpec.sampled()
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        fleet.score("math", items, spec)
        fleet._cache._writer.submit(int).result()  # type: ignore[attr-defined]  # they are kept
        server.models["math"] = tiny.model(2)
        fleet.adopt("math")
        scores = fleet.score("math", items, spec)
        assert {one.weights_hash for one in scores} == {tiny.model(2).weights_hash}


def test_a_record_replaces_the_teacher(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    items, spec = tiny.items(6), PayloadSpec.hidden("f32")
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        live = fleet.score("math", items, spec)
        head = fleet.head("math")
    server.stop()
    with TeacherFleet.connect(f"store:{tmp_path}") as fleet:
        assert [raw(s) for s in fleet.score("math", items, spec)] == [raw(s) for s in live]
        assert np.array_equal(fleet.head("math").weight, head.weight)
        assert fleet.describe("math").vocab_size == 64 and fleet.outages() == []
        assert fleet.status().teachers[0].teacher == "math"
        with pytest.raises(DataError, match=r"no hidden scores .*'math'"):
            fleet.score("math", tiny.items(1, seed=9), spec)
        with pytest.raises(DataError, match="has no sampled scores"):
            fleet.score("math", items, PayloadSpec.sampled())
        with pytest.raises(TeacherNotFoundError, match="it holds math"):
            fleet.describe("code")


def row(number: int, size: int = 100) -> StoredRow:
    item = ScoreItem(np.full(size, number, dtype=np.uint32), 1)
    scores = Scores(sampled=np.full(size - 1, -2.0, np.float32), weights_hash="w", wire_bytes=4)
    return StoredRow("t", item, PayloadSpec.sampled(), 0.7, scores)


def overwrite(folder: Path, key: str, data: bytes) -> None:
    with contextlib.closing(sqlite3.connect(folder / "scores.sqlite")) as database, database:
        of_key = "WHERE id = (SELECT id FROM rows WHERE key = ?)"
        changed = database.execute(f"UPDATE payloads SET data = ? {of_key}", (data, bytes.fromhex(key)))
        assert changed.rowcount == 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ScoreStore]:
    with contextlib.closing(ScoreStore(tmp_path)) as store:
        yield store


def test_a_store_can_be_iterated_as_a_data_set(store: ScoreStore) -> None:
    rows = {row(number).key: row(number) for number in range(5)}
    assert store.put(list(rows.values())) == list(rows)
    store.put([row(3)])
    found = list(store.entries())
    assert [entry.key for entry in found] == sorted(rows) and len(store) == 5
    for entry in found:
        assert np.array_equal(entry.item.token_ids, rows[entry.key].item.token_ids) and entry.item.prompt_length == 1
        assert entry.temperature == 0.7 and entry.teacher == "t" and entry.scores.wire_bytes == 4


def test_everything_the_numbers_depend_on_is_in_the_key() -> None:
    ids = np.arange(6, dtype=np.uint32)
    gather = np.zeros((4, 1), np.uint32)
    base = score_key("w", ScoreItem(ids, 2, gather), PayloadSpec.gather(1), 1.0)
    other = ids.copy()
    other[5] += 1
    keys = {
        base,
        score_key("v", ScoreItem(ids, 2, gather), PayloadSpec.gather(1), 1.0),
        score_key("w", ScoreItem(other, 2, gather), PayloadSpec.gather(1), 1.0),
        score_key("w", ScoreItem(ids, 3, gather), PayloadSpec.gather(1), 1.0),
        score_key("w", ScoreItem(ids, 2, gather + 1), PayloadSpec.gather(1), 1.0),
        score_key("w", ScoreItem(ids, 2, gather), PayloadSpec.gather(1, "f32"), 1.0),
        score_key("w", ScoreItem(ids, 2, gather), PayloadSpec.gather(1), 2.0),
        score_key("w", ScoreItem(ids, 2, gather), PayloadSpec.topk(1), 1.0),
        score_key("w", ScoreItem(ids, 2, gather, ((0, 2),)), PayloadSpec.gather(1), 1.0),
        score_key("w", ScoreItem(ids, 2, gather, ((0, 1), (2, 3))), PayloadSpec.gather(1), 1.0),
    }
    assert len(keys) == 10
    assert base == score_key("w", ScoreItem(ids.copy(), 2, gather.copy()), PayloadSpec.gather(1), 1.0)


@pytest.mark.parametrize("position", [3, 60, 400, -1])
def test_a_damaged_row_is_dropped_from_a_cache_and_named_by_a_data_set(store: ScoreStore, position: int) -> None:
    key, kept = store.put([row(0), row(1)])
    data = bytearray(to_bytes(row(0)))
    data[position] ^= 0x10
    overwrite(store.folder, key, bytes(data))
    with pytest.raises(DataError, match=key):
        list(store.entries())
    assert store.get(key) is None and key not in store
    assert store.get(kept) is not None and len(store) == 1


def sealed(data: bytes) -> bytes:
    """A row's bytes with the checksum that belongs to them."""
    return crc32c(data).to_bytes(4, "little") + data


def of_another_make(**changes: object) -> bytes:
    """A row's bytes, whole and under its own key, whose scores are not those of its payload."""
    return to_bytes(replace(row(0), scores=replace(row(0).scores, **changes)))


DEEP = b'{"a":' * 100_000
WRONG = {
    "text": "words",
    "broken text": sqlite3.Binary(b""),
    "a number": 7,
    "a fraction": 0.5,
    "empty": b"",
    "cut off": to_bytes(row(0))[:40],
    "not a file": sealed(b"x" * 50),
    "no metadata": sealed(save({"token_ids": np.zeros(3, np.uint32)})),
    "a list as metadata": sealed((2).to_bytes(8, "little") + b"[]"),
    "deep metadata": sealed(len(DEEP).to_bytes(8, "little") + DEEP),
    "other shape": of_another_make(sampled=np.zeros((99, 2), np.float32)),
    "other length": of_another_make(sampled=np.zeros(98, np.float32)),
    "other dtype": of_another_make(sampled=np.zeros(99, np.int32)),
    "none": of_another_make(sampled=None),
    "another kind": of_another_make(hidden=np.zeros((99, 4), np.float32)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_row_that_is_wrong_in_any_way_is_a_miss_and_is_said_once(
    store: ScoreStore, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keys = store.put([row(0), row(1), row(2)])
    for key in keys[:2]:
        overwrite(store.folder, key, wrong)
    with pytest.raises(DataError, match="are damaged"):
        store.read(keys[0])
    assert [store.get(key) is None for key in keys] == [True, True, False]
    (said,) = caplog.records
    assert keys[0] in said.message
    assert store.put([row(0)]) == keys[:1] and store.get(keys[0]) is not None


def test_a_flipped_bit_anywhere_in_a_row_is_seen() -> None:
    kept = row(0)
    data = to_bytes(kept)
    assert from_bytes(kept.key, data, "here").key == kept.key
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        with pytest.raises(DataError, match="checksum does not match"):
            from_bytes(kept.key, bytes(damaged), "here")


def test_a_damaged_row_of_a_record_is_named_and_left_where_it_is(tiny: SimpleNamespace, tmp_path: Path) -> None:
    item = tiny.items(1)[0]
    with TeacherFleet.connect(tiny.serve().address, settings=caching(tiny, tmp_path)) as fleet:
        fleet.score("math", [item], PayloadSpec.sampled())
    with contextlib.closing(ScoreStore(tmp_path)) as store:
        (found,) = store.entries()
    data = to_bytes(found)
    for damaged in (data[:-1], data.replace(b'"k":"0"', b'"k":"1"')):
        assert damaged != data
        overwrite(tmp_path, found.key, damaged)
        with TeacherFleet.connect(f"store:{tmp_path}") as fleet:
            for _ in range(2):
                with pytest.raises(DataError, match=found.key):
                    fleet.score("math", [item], PayloadSpec.sampled())


def test_a_row_under_a_foreign_key_is_refused(store: ScoreStore) -> None:
    one, two = store.put([row(1), row(2)])
    overwrite(store.folder, two, to_bytes(row(1)))
    assert store.get(two) is None and store.get(one) is not None


def test_the_least_recently_used_rows_make_room_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bound = 400_000
    size = 4 * 2500
    keys = []
    with contextlib.closing(ScoreStore(tmp_path, bound)) as store:
        for number in range(10):
            keys += store.put([row(number, size // 8)])
        assert store.get(keys[0]) is not None
    assert not caplog.records and len(keys) == 10
    # The use of the first row outlives the process that read it.
    with contextlib.closing(ScoreStore(tmp_path, bound)) as store:
        number = 10
        while keys[1] in store:
            keys += store.put([row(number, size // 8)])
            number += 1
        assert keys[0] in store and keys[-1] in store and 12 < len(store) < number < 60
        for more in range(number, number + 60):
            keys += store.put([row(more, size // 8)])
            assert (tmp_path / "scores.sqlite").stat().st_size <= bound
        kept = [key in store for key in keys]
        assert kept == sorted(kept) and kept[-12]  # the oldest go first
    (said,) = caplog.records
    assert "used least recently are dropped" in said.message
    with contextlib.closing(ScoreStore(tmp_path, bound // 4)) as store:
        assert keys[-1] in store
        store.put([row(99), row(100, bound)])
        assert row(99).key in store and row(100, bound).key not in store  # a row that never fits is not kept
        assert (tmp_path / "scores.sqlite").stat().st_size <= bound // 4
    assert CacheSettings().max_bytes == 50 * 2**30


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_store import ScoreStore, raw, row
store, first = ScoreStore(Path(sys.argv[1])), int(sys.argv[3])
for number in range(0, 2 * int(sys.argv[4]), 2):
    every = row(number, 2000)  # which all writers store
    store.put([row(first + number, 2000), row(first + number + 1, 2000), every])
    assert raw(store.get(every.key)) == raw(every.scores)
    print(first + number, flush=True)
"""


def writer(folder: Path, first: int, batches: int) -> Program:
    place = str(Path(__file__).parent)
    return Program([sys.executable, "-c", WRITER, str(folder), place, str(first), str(batches)])


def told(program: Program) -> list[int]:
    return [int(line) for line in program.output()[0].split("\n")[:-1]]


def test_rows_that_processes_store_at_once_are_whole_whichever_of_them_are_killed(tmp_path: Path) -> None:
    calm = [writer(tmp_path, first, 15) for first in (10**6, 2 * 10**6)]
    killed = [writer(tmp_path, first, 10**6) for first in (3 * 10**6, 4 * 10**6)]
    try:
        with contextlib.closing(ScoreStore(tmp_path)) as store:
            for count, one in enumerate(killed, 1):
                wait_until(lambda one=one, count=count: one.poll() is not None or len(told(one)) > 5 * count, 300)
                one.kill()
                assert one.wait(120) == -signal.SIGKILL, one.output()
                assert len(list(store.entries())) >= 15  # every row passes its checksum
            finish(calm, 300)
            found = {int(entry.item.token_ids[0]) for entry in store.entries()}
    finally:
        for one in (*calm, *killed):
            one.kill()
    stored = [number for one in (*calm, *killed) for number in told(one)]
    assert {number + more for number in stored for more in (0, 1)} | set(range(0, 30, 2)) <= found
    own = {number for number in found if number >= 10**6}
    assert {number ^ 1 for number in own} == own  # a batch is there as a whole or not at all
    with contextlib.closing(sqlite3.connect(tmp_path / "scores.sqlite")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_damaged_head_of_a_record_is_named_whatever_is_damaged_in_it(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with TeacherFleet.connect(tiny.serve().address, settings=caching(tiny, tmp_path)) as fleet:
        head = fleet.head("math")
    (file,) = (tmp_path / "heads").iterdir()
    data = file.read_bytes()
    with contextlib.closing(ScoreStore(tmp_path)) as store:
        found = store.head(head.hash)
        assert found is not None and np.array_equal(found.weight, head.weight)
        for old, new in ((b"logit_scale", b"logit_skale"), (b'"weight"', b'"veight"'), (b"1.0", b"1,0"), (b"{", b"[")):
            assert old in data
            file.write_bytes(data.replace(old, new, 1))
            with pytest.raises(DataError, match=head.hash):
                store.head(head.hash)


def test_a_store_that_is_cut_off_or_of_another_format_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for name in ("torn", "newer"):
        with contextlib.closing(ScoreStore(tmp_path / name)) as store:
            store.put([row(number) for number in range(200)])
    torn = tmp_path / "torn" / "scores.sqlite"
    torn.write_bytes(torn.read_bytes()[: -torn.stat().st_size // 2])
    with pytest.raises(DataError, match=r"torn.* is damaged"):
        ScoreStore(torn.parent)
    torn.write_bytes(b"no store " * 1000)
    with pytest.raises(DataError, match=r"torn.* is damaged: .*not a database"):
        ScoreStore(torn.parent)
    with contextlib.closing(sqlite3.connect(tmp_path / "newer" / "scores.sqlite")) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(DataError, match=r"newer.* format 9.* format 2"):
        ScoreStore(tmp_path / "newer")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a score store"):
        TeacherFleet.connect(f"store:{tmp_path}")
    ScoreStore(tmp_path).close()
    with pytest.raises(DataError, match="holds no teacher"):
        TeacherFleet.connect(f"store:{tmp_path}")
    with pytest.raises(ConfigError, match="must stand alone"):
        TeacherFleet.connect(["store:x", "h:1"])


def test_a_cache_on_a_full_or_missing_disk_does_not_stop_the_run(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    with TeacherFleet.connect(server.address, settings=caching(tiny, tmp_path)) as fleet:
        for path in sorted(tmp_path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        assert len(fleet.score("math", tiny.items(3), PayloadSpec.sampled())) == 3


def test_a_store_whose_disk_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="file/store cannot be created: Not a directory"):
        ScoreStore(tmp_path / "file" / "store")
