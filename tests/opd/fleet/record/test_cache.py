"""The cache on a disk that is full, by the bound that SQLite itself sets to a file, and beyond a quota."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import resource
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE, wait_until

from opd.fleet.record import cache
from opd.fleet.record.cache import CachedScores
from opd.fleet.record.row import StoredRow
from opd.fleet.record.store import ScoreStore
from opd.wire.fingerprint import head_hash
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

LONG = 5000


def row(number: int) -> StoredRow:
    item = ScoreItem(np.full(LONG, number, dtype=np.uint32), 1)
    scores = Scores(sampled=np.full(LONG - 1, -2.0, np.float32), weights_hash="w", wire_bytes=4 * LONG)
    return StoredRow("t", item, PayloadSpec.sampled(), 1.0, scores)


def bound(store: ScoreStore, pages: int) -> None:
    store._scores._writer.execute(f"PRAGMA max_page_count = {pages}")


def kept(folder: Path) -> list[int]:
    with contextlib.closing(ScoreStore(folder)) as store:
        return sorted(int(entry.item.token_ids[0]) for entry in store.entries())


def write(cached: CachedScores, *numbers: int) -> None:
    for number in numbers:
        cached.write(row(number))
        cached._writer.submit(int).result()  # the writer has come to it


def test_rows_that_find_the_disk_full_are_written_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_RETRY_SECONDS", 0.0)
    store = ScoreStore(tmp_path)
    cached = CachedScores(store)
    write(cached, 0)
    bound(store, 1)
    write(cached, 1, 2)
    assert len(store) == 1
    bound(store, 1_000_000)
    write(cached, 3)
    assert len(store) == 4
    cached.close()
    assert kept(tmp_path) == [0, 1, 2, 3]
    full, again = (record.message for record in caplog.records)
    assert "cannot be written (database or disk is full)" in full and "can be written again" in again


def test_rows_beyond_a_quota_which_sqlite_calls_an_i_o_error_are_written_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_RETRY_SECONDS", 0.0)
    cached = CachedScores(ScoreStore(tmp_path))
    write(cached, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # EFBIG goes the way of EDQUOT through SQLite, which knows ENOSPC alone.
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "scores.sqlite").stat().st_size, before[1]))
    try:
        write(cached, 1, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write(cached, 3)
    cached.close()
    assert kept(tmp_path) == [0, 1, 2, 3]


def test_closing_tries_once_more_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ScoreStore(tmp_path)
    cached = CachedScores(store)
    bound(store, 1)
    write(cached, 1, 2)
    bound(store, 1_000_000)
    write(cached, 3)
    assert len(store) == 0  # a full disk is not tried again for each row
    cached.close()
    assert kept(tmp_path) == [1, 2, 3] and len(caplog.records) == 2


def test_rows_between_two_tries_take_no_more_memory_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_RETRY_SECONDS", 1e6)
    monkeypatch.setattr(cache, "_HELD_BYTES", 8 * LONG)  # two rows
    store = ScoreStore(tmp_path)
    cached = CachedScores(store)
    bound(store, 1)
    write(cached, 1, 2, 3, 4)
    assert [held.item.token_ids[0] for held in cached._waiting] == [1, 2] and cached._lost == 2
    bound(store, 1_000_000)
    cached.close()
    assert kept(tmp_path) == [1, 2]


def test_the_end_says_how_many_rows_a_full_disk_has_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_HELD_BYTES", 8 * LONG)  # two rows
    store = ScoreStore(tmp_path)
    cached = CachedScores(store)
    bound(store, 1)
    write(cached, 1, 2, 3, 4)
    assert [held.item.token_ids[0] for held in cached._waiting] == [1, 2]
    cached.close()
    assert kept(tmp_path) == []
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["the", "4"]


def test_a_teacher_and_a_head_that_found_no_space_are_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ScoreStore(tmp_path)
    cached = CachedScores(store)
    info = pb.TeacherInfo(name="t", weights_hash="w")
    head = Head(np.ones((4, 2), np.float32), None, "f32", 1.0, 0.0, "")
    head = dataclasses.replace(head, hash=head_hash(head))

    def full(file: object, path: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        cached.look_up(info, [], PayloadSpec.sampled(), 1.0, [])
        cached.keep_head(head)
    assert not store.teachers()
    cached.look_up(info, [], PayloadSpec.sampled(), 1.0, [])
    cached.close()
    assert store.teachers() == {"t": info} and store.head(head.hash) is not None


def test_a_disk_slower_than_the_scores_holds_up_who_asks_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_HELD_BYTES", 8 * LONG)  # two rows
    store, disk = ScoreStore(tmp_path), threading.Event()
    put = store.put
    monkeypatch.setattr(store, "put", lambda rows: disk.wait() and put(rows))
    cached = CachedScores(store)
    info = pb.TeacherInfo(name="t", weights_hash="w")

    def ask() -> None:
        cached.look_up(info, [row(9).item], PayloadSpec.sampled(), 1.0, [concurrent.futures.Future()])

    with concurrent.futures.ThreadPoolExecutor(1) as other:
        for number in range(4):
            other.submit(ask).result(timeout=PATIENCE)
            cached.write(row(number))
            wait_until(lambda waiting=number: len(cached._waiting) == waiting)  # the first is on its way to the disk
        asked = other.submit(ask)
        assert not concurrent.futures.wait([asked], timeout=0.1).done
        disk.set()
        asked.result(timeout=PATIENCE)
    cached.close()
    assert kept(tmp_path) == [0, 1, 2, 3]


def test_a_row_longer_than_sqlite_takes_costs_no_other_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = ScoreStore(tmp_path)
    store._scores._writer.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * LONG)  # 1 GB, were it not set here
    cached = CachedScores(store)
    cached.write(row(1))
    item = ScoreItem(np.full(4, 2, dtype=np.uint32), 1)
    write(cached, 3)
    scores = Scores(sampled=np.zeros(3, np.float32), weights_hash="w", wire_bytes=12)
    cached.write(StoredRow("t", item, PayloadSpec.sampled(), 1.0, scores))
    cached.close()
    assert kept(tmp_path) == [2] and not caplog.records


def test_a_damaged_store_is_named_once_and_not_for_every_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(ScoreStore(tmp_path)) as store:
        store.put([row(number) for number in range(9)])
    path = tmp_path / "scores.sqlite"
    path.write_bytes(path.read_bytes()[:8192].ljust(path.stat().st_size, b"\xff"))
    cached = CachedScores(ScoreStore(tmp_path))
    futures = [concurrent.futures.Future() for _ in range(9)]
    items = [row(number).item for number in range(9)]
    cached.look_up(pb.TeacherInfo(name="t", weights_hash="w"), items, PayloadSpec.sampled(), 1.0, futures)
    write(cached, 10, 11)
    cached.close()
    damaged, lost = (record.message for record in caplog.records)
    assert "is damaged" in damaged and lost.startswith("2 rows could not be stored in") and cached.misses == 9


def test_rows_that_cannot_be_stored_are_named_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cached = CachedScores(ScoreStore(tmp_path))
    cached.write(dataclasses.replace(row(1), teacher="\ud800"))  # no UTF-8 has this
    cached._writer.submit(int).result()
    write(cached, 2)
    cached.close()
    named, lost = (record.message for record in caplog.records)
    assert "surrogates not allowed" in named and lost.startswith("1 rows could not be stored in")
    assert kept(tmp_path) == [2]
