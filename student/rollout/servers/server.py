"""One rollout server: whether it answers, and the weights that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from opd.errors import RolloutEngineError
from student.rollout.servers.dialect import Answer, Ask, Dialect, Facts
from student.rollout.servers.http import Connection, LostError, RefusedError
from student.rollout.servers.settings import ServersSettings

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

_ANSWER_SECONDS = 60.0  # for what a server tells without computing


class NotLoadedError(RolloutEngineError):
    """A server did not take weights."""


class Server:
    """A server that rows are sampled with.

    Args:
        url: its address.
        dialect: how it is asked.
        settings: of the engine.
        adapters: whether it is sent adapters, and not whole weights.

    Attributes:
        label: the weights that rows are asked of, None where it holds others or none.
        lost: why rows are not asked of it now, a clause; "" when they are.
    """

    def __init__(self, url: str, dialect: Dialect, settings: ServersSettings, *, adapters: bool) -> None:
        self.url, self._dialect, self._settings, self._adapters = url, dialect, settings, adapters
        self.label: str | None = None
        self.lost = ""
        self._good: tuple[Path, str] | None = None

    def connect(self, seconds: float | None = None) -> Connection:
        """A connection; `seconds` to wait for an answer, those of a row when None."""
        return Connection(self.url, self._settings.api_key(), seconds or self._settings.row_seconds)

    def facts(self) -> Facts:
        """See `Dialect.facts`."""
        connection = self.connect(min(_ANSWER_SECONDS, self._settings.row_seconds))
        try:
            return self._dialect.facts(connection, adapters=self._adapters, nccl=self._settings.transfer == "nccl")
        finally:
            connection.close()

    def generate(self, connection: Connection, ask: Ask) -> Answer:
        """See `Dialect.generate`.

        Raises:
            LostError: when it does not answer, or is broken.
            RefusedError: when it refuses the row.
        """
        with _broken_is_lost():
            return self._dialect.generate(connection, ask, adapters=self._adapters)

    def update(self, source: Path | HeldWeights, label: str, lock: FileLock) -> bool:
        """Have the server hold the weights, of a folder or of this process; returns whether it had to load them.

        Raises:
            LostError: when it does not answer.
            NotLoadedError: when it could not load them; it holds those of before again, or is not asked any more.
        """
        self.label = None
        connection = self.connect(self._settings.sync_seconds)
        try:
            with lock:
                held = self._held()
                if new := label not in held:
                    self._load(connection, source, label, held)
            self.label, self.lost = label, ""
            if isinstance(source, Path):  # others are nowhere any more once the student has moved on
                self._good = source, label
            return new
        finally:
            connection.close()

    def _held(self) -> frozenset[str]:
        """See `Dialect.holds`."""
        # Not with the time that weights take: a server that accepts connections and hangs would cost it at each sync.
        connection = self.connect(min(_ANSWER_SECONDS, self._settings.sync_seconds))
        try:
            with _broken_is_lost():
                return self._dialect.holds(connection, adapters=self._adapters)
        finally:
            connection.close()

    def _load(self, connection: Connection, source: Path | HeldWeights, label: str, held: frozenset[str]) -> None:
        if self._adapters and isinstance(source, Path):
            # Adapters of other runs on the same server are not this one's to take out.
            mine = {self._good[1]} if self._good else set()
            try:
                self._dialect.load_adapter(connection, source, label, held & mine)
            except RolloutEngineError as error:
                raise NotLoadedError(
                    f"rollout server {self.url} did not take adapters {label}: {str(error).rstrip('.')}."
                ) from error
            return
        try:
            if isinstance(source, Path):
                self._dialect.load(connection, source, label)
            else:
                self._dialect.receive(connection, source, label)
        except RolloutEngineError as error:
            state = "it holds no whole weights now"
            if self._good is not None and self._good[0].exists():
                try:
                    self._dialect.load(connection, *self._good)
                    state = f"it holds weights {self._good[1]} again, those of before"
                except (RolloutEngineError, LostError) as other:
                    state += f" ({other})"
            raise NotLoadedError(
                f"rollout server {self.url} did not take weights {label}: {error}; {state}."
            ) from error


@contextmanager
def _broken_is_lost() -> Iterator[None]:
    """A server whose engine has died answers 500 until it ends; what is wrong with a request itself is a 4xx."""
    try:
        yield
    except RefusedError as error:
        if error.code < 500:
            raise
        raise LostError(str(error)) from error
