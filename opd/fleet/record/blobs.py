"""Bytes by key in one SQLite file: bounded, shared between processes, and consistent after a kill or a power cut.

Rows are written in transactions with a rollback journal. If a process is killed, the next one to open the file plays
the journal back, so a row is there as a whole or not at all. With a rollback journal, appended bytes are written once,
where a write-ahead log would write them twice, and processes on several hosts may share a folder if its file system
supports locks.
"""

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from opd.errors import DataError

log = logging.getLogger("opd.fleet")
FORMAT = 2
"""Format number of a store, kept in `user_version`; raised when tables here, or keys or bytes in row.py, change their
meaning."""
_TRIM_TO = 0.9
_WAIT_SECONDS = 60.0
_PAGE = 8192
_OVERHEAD = 4 * _PAGE  # most that a row takes besides its bytes: half-empty pages of the payload and the two indices
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# The payload has a table of its own, so that recording a use does not rewrite it.
_SCHEMA = (
    "CREATE TABLE rows (key BLOB PRIMARY KEY, id INTEGER NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE payloads (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    "CREATE INDEX rows_by_use ON rows (used)",
    f"PRAGMA user_version = {FORMAT}",
)


class Blobs:
    """Bytes under keys in hex. Thread-safe; several processes may have the same file open.

    Args:
        path: the file, which is created if it does not exist.
        max_bytes: largest size of the file; the least recently used rows make room for new ones. 0 keeps all.

    Raises:
        DataError: if the file is damaged or not one of ours.
        OSError: if the file cannot be read or written; the methods raise it too.
    """

    def __init__(self, path: Path, max_bytes: int = 0) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._used: dict[bytes, int] = {}
        self._trimmed = False
        with self._failures():
            # Two connections, so that a reader does not wait for a writer of its own process to reach the disk.
            self._reader, self._writer = self._connect(), self._connect()
            self._prepare()
            self._shrink()

    def get(self, key: str) -> bytes | None:
        """The bytes under a key; None if there are none."""
        name = bytes.fromhex(key)
        with self._failures(), self._reading:
            found = self._reader.execute(
                # Cast, because SQLite lets a column hold values of any type: other ones are damaged bytes.
                "SELECT CAST(data AS BLOB) FROM rows JOIN payloads USING (id) WHERE key = ?",
                (name,),
            ).fetchone()
            # Kept in memory until the next write: a transaction for every read would make readers wait for the disk.
            if found is not None and self._max_bytes:
                self._used[name] = time.time_ns()
        return None if found is None else found[0]

    def put(self, rows: Sequence[tuple[str, bytes]]) -> None:
        """Store rows in one transaction. Rows whose key exists stay as they are; rows that never fit are left out."""
        with self._transaction() as database:
            # 1 GB by default. A longer row would make the transaction fail, and all rows that wait with it, every time.
            longest = database.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) - _PAGE
            # First, so that what was just read is not dropped to make room for the new rows.
            self._note_uses(database)
            for key, data in rows:
                name = bytes.fromhex(key)
                known = database.execute("SELECT 1 FROM rows WHERE key = ?", (name,)).fetchone()
                if known is None and len(data) < longest and self._make_room(database, len(data) + _OVERHEAD):
                    row = database.execute("INSERT INTO payloads (data) VALUES (?)", (data,)).lastrowid
                    database.execute("INSERT INTO rows VALUES (?, ?, ?)", (name, row, time.time_ns()))

    def remove(self, key: str) -> None:
        """Remove a row."""
        with self._transaction() as database:
            _delete(database, [bytes.fromhex(key)])

    def __iter__(self) -> Iterator[str]:
        """The current keys, sorted."""
        with self._failures(), self._reading:
            keys = self._reader.execute("SELECT CAST(key AS BLOB) FROM rows ORDER BY key").fetchall()
        return (key.hex() for (key,) in keys)

    def __contains__(self, key: str) -> bool:
        with self._failures(), self._reading:
            found = self._reader.execute("SELECT 1 FROM rows WHERE key = ?", (bytes.fromhex(key),)).fetchone()
        return found is not None

    def __len__(self) -> int:
        with self._failures(), self._reading:
            return int(self._reader.execute("SELECT count(*) FROM rows").fetchone()[0])

    def close(self) -> None:
        """Record which rows were used, and close the file."""
        try:
            if self._used:
                with self._transaction() as database:
                    self._note_uses(database)
        finally:
            self._reader.close()
            self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        for pragma in (f"page_size = {_PAGE}", "auto_vacuum = INCREMENTAL", "journal_mode = TRUNCATE"):
            database.execute(f"PRAGMA {pragma}")
        # With NORMAL, a power cut at the wrong moment can corrupt the file; FULL costs one more flush per transaction.
        database.execute("PRAGMA synchronous = FULL")
        return database

    def _prepare(self) -> None:
        if self._version() == 0:
            with self._transaction() as database:
                if self._version() == 0:  # still: no other process was faster
                    for statement in _SCHEMA:
                        database.execute(statement)
        if self._version() != FORMAT:
            raise DataError(
                f"score store {self.path} has format {self._version()}, but this version of opd reads format {FORMAT}; "
                "score into a new folder."
            )

    def _version(self) -> int:
        return int(self._writer.execute("PRAGMA user_version").fetchone()[0])

    def _note_uses(self, database: sqlite3.Connection) -> None:
        with self._reading:
            used, self._used = self._used, {}
        database.executemany("UPDATE rows SET used = ? WHERE key = ?", [(when, key) for key, when in used.items()])

    def _make_room(self, database: sqlite3.Connection, size: int) -> bool:
        """Drop the least recently used rows if the file would exceed its bound; False for a row that can never fit.

        A tenth of the bound is free afterwards, so that this happens rarely.
        """
        if not self._max_bytes:
            return True
        if size > _TRIM_TO * self._max_bytes:
            return False
        surplus = (self._pages("page_count") - self._pages("freelist_count")) * _PAGE + size - self._max_bytes
        if surplus > 0:
            self._say_so_once()
            surplus += int((1 - _TRIM_TO) * self._max_bytes)
            dropped = []
            oldest = "SELECT key, length(CAST(data AS BLOB)) FROM rows JOIN payloads USING (id) ORDER BY used"
            for key, length in database.execute(oldest):
                if surplus <= 0:
                    break
                dropped.append(key)
                surplus -= length
            _delete(database, dropped)
        return True

    def _shrink(self) -> None:
        """Return disk space to the system if the file, which may have had a larger bound, exceeds this one."""
        if self._max_bytes and self._pages("page_count") * _PAGE > self._max_bytes:
            with self._transaction() as database:
                self._make_room(database, 0)
            # As a script, because Python's `execute` would stop after the first page.
            self._writer.executescript(f"PRAGMA incremental_vacuum({self._pages('freelist_count')})")

    def _pages(self, what: str) -> int:
        return int(self._writer.execute(f"PRAGMA {what}").fetchone()[0])

    def _say_so_once(self) -> None:
        if not self._trimmed:
            self._trimmed = True
            log.warning(
                "the score store %s has reached %d bytes; from now on the scores used least recently are dropped "
                "(teachers.fleet.cache.max_bytes)",
                self.path.parent,
                self._max_bytes,
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._failures(), self._writing:
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
            if code in _DAMAGED:
                raise DataError(f"score store {self.path} is damaged: {error}; remove it and score again.") from error
            number = errno.ENOSPC if code == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(number, str(error), os.fspath(self.path)) from error


def _delete(database: sqlite3.Connection, keys: Sequence[bytes]) -> None:
    names = [(key,) for key in keys]
    database.executemany("DELETE FROM payloads WHERE id = (SELECT id FROM rows WHERE key = ?)", names)
    database.executemany("DELETE FROM rows WHERE key = ?", names)
