import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from opd.errors import ConfigError, DataError, TeacherNotFoundError
from opd.fleet.client import TeacherFleet
from opd.fleet.record.store import ScoreStore, score_key
from opd.fleet.settings import CacheSettings
from opd.wire.types import PayloadSpec, ScoreItem, Scores

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
        with pytest.raises(DataError, match="has no hidden scores of teacher 'math'"):
            fleet.score("math", tiny.items(1, seed=9), spec)
        with pytest.raises(DataError, match="has no sampled scores"):
            fleet.score("math", items, PayloadSpec.sampled())
        with pytest.raises(TeacherNotFoundError, match="it holds math"):
            fleet.describe("code")


def test_a_store_can_be_iterated_as_a_data_set(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    rows = {}
    for i in range(5):
        item = ScoreItem(np.arange(i + 3, dtype=np.uint32), 2)
        scores = Scores(sampled=np.full(i + 1, -1.0, np.float32), weights_hash="w", wire_bytes=4)
        rows[store.put("t", item, PayloadSpec.sampled(), 0.7, scores)] = item
    found = {entry.key: entry for entry in store.entries()}
    assert found.keys() == rows.keys() and len(store) == 5
    for key, entry in found.items():
        assert np.array_equal(entry.item.token_ids, rows[key].token_ids) and entry.item.prompt_length == 2
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
    }
    assert len(keys) == 8
    assert base == score_key("w", ScoreItem(ids.copy(), 2, gather.copy()), PayloadSpec.gather(1), 1.0)


def put_one(store: ScoreStore, number: int = 0, size: int = 100) -> Path:
    item = ScoreItem(np.full(size, number, dtype=np.uint32), 1)
    scores = Scores(sampled=np.full(size - 1, -2.0, np.float32), weights_hash="w")
    key = store.put("t", item, PayloadSpec.sampled(), 1.0, scores)
    return store.folder / "scores" / key[:2] / f"{key}.safetensors"


@pytest.mark.parametrize("position", [3, 60, 400, -1])
def test_a_damaged_entry_is_dropped_from_a_cache_and_named_by_a_data_set(tmp_path: Path, position: int) -> None:
    store = ScoreStore(tmp_path)
    path = put_one(store)
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(DataError, match=path.stem):
        list(store.entries())
    assert store.get(path.stem) is None and not path.exists()


def test_a_damaged_entry_of_a_record_is_named_and_left_where_it_is(tiny: SimpleNamespace, tmp_path: Path) -> None:
    item = tiny.items(1)[0]
    with TeacherFleet.connect(tiny.serve().address, settings=caching(tiny, tmp_path)) as fleet:
        fleet.score("math", [item], PayloadSpec.sampled())
    (path,) = (tmp_path / "scores").rglob("*.safetensors")
    data = path.read_bytes()
    for damaged in (data[:-1], data.replace(b'"k":"0"', b'"k":"1"')):
        assert damaged != data
        path.write_bytes(damaged)
        with TeacherFleet.connect(f"store:{tmp_path}") as fleet, pytest.raises(DataError, match=path.stem):
            fleet.score("math", [item], PayloadSpec.sampled())
        assert path.read_bytes() == damaged


def test_a_truncated_entry_is_dropped(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    path = put_one(store)
    path.write_bytes(path.read_bytes()[:-7])
    assert store.get(path.stem) is None


def test_an_entry_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    one, two = put_one(store, 1), put_one(store, 2)
    two.write_bytes(one.read_bytes())
    assert store.get(two.stem) is None and store.get(one.stem) is not None


def test_the_least_recently_used_entries_make_room_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = put_one(ScoreStore(tmp_path / "one")).stat().st_size
    store = ScoreStore(tmp_path / "cache", max_bytes=10 * size)
    paths = []
    for number in range(10):
        paths.append(put_one(store, number))
        os.utime(paths[-1], ns=(number, number))
    assert store.get(paths[0].stem) is not None
    assert not caplog.records
    put_one(store, 10)
    assert paths[0].exists() and not paths[1].exists()
    assert len(store) <= 10
    for number in range(11, 20):
        put_one(store, number)
    assert len(store) <= 10 and "used least recently are dropped" in "".join(r.message for r in caplog.records)
    assert len(caplog.records) == 1
    assert CacheSettings().max_bytes == 50 * 2**30


def test_no_half_written_file_stays_behind(tmp_path: Path) -> None:
    store = ScoreStore(tmp_path)
    put_one(store)
    assert not list(tmp_path.rglob(".writing-*"))


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a score store"):
        TeacherFleet.connect(f"store:{tmp_path}")
    ScoreStore(tmp_path)
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
