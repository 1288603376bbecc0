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

_ANSWER_SECONDS = 60.0  # timeout for calls that a server answers without computing


class NotLoadedError(RolloutEngineError):
    """A server could not load the weights."""


class Server:
    """A server that rows are sampled with.

    Args:
        url: its address.
        dialect: the calls of this kind of server.
        settings: the engine's settings.
        adapters: whether it is sent adapters instead of whole weights.

    Attributes:
        label: label of the weights that it holds; None if it holds other weights or none.
        lost: a clause saying why the server is not used; "" if it is.
    """

    def __init__(self, url: str, dialect: Dialect, settings: ServersSettings, *, adapters: bool) -> None:
        self.url, self._dialect, self._settings, self._adapters = url, dialect, settings, adapters
        self.label: str | None = None
        self.lost = ""
        self._good: tuple[Path, str] | None = None

    def connect(self, seconds: float | None = None) -> Connection:
        """A connection with a timeout of `seconds`, or the timeout of a row if None."""
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
            LostError: if the server does not answer, or its engine has died.
            RefusedError: if it refuses the row.
        """
        with _broken_is_lost():
            return self._dialect.generate(connection, ask, adapters=self._adapters)

    def update(self, source: Path | HeldWeights, label: str, lock: FileLock) -> bool:
        """Load weights from a folder or from this process into the server, unless it holds them already.

        Returns:
            Whether the server had to load them.

        Raises:
            LostError: if the server does not answer.
            NotLoadedError: if it could not load them; it then holds the previous weights again, or is not used.
        """
        self.label = None
        connection = self.connect(self._settings.sync_seconds)
        try:
            with lock:
                held = self._held()
                if new := label not in held:
                    self._load(connection, source, label, held)
            self.label, self.lost = label, ""
            if isinstance(source, Path):  # weights of this process no longer exist once the student has moved on
                self._good = source, label
            return new
        finally:
            connection.close()

    def _held(self) -> frozenset[str]:
        """See `Dialect.holds`."""
        # With a short timeout: a server that accepts connections but hangs would otherwise delay each sync.
        connection = self.connect(min(_ANSWER_SECONDS, self._settings.sync_seconds))
        try:
            with _broken_is_lost():
                return self._dialect.holds(connection, adapters=self._adapters)
        finally:
            connection.close()

    def _load(self, connection: Connection, source: Path | HeldWeights, label: str, held: frozenset[str]) -> None:
        if self._adapters and isinstance(source, Path):
            # Only this run's adapter is unloaded; other runs may have adapters on the same server.
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
            state = "it now holds an incomplete set of weights"
            if self._good is not None and self._good[0].exists():
                try:
                    self._dialect.load(connection, *self._good)
                    state = f"it holds the earlier weights {self._good[1]} again"
                except (RolloutEngineError, LostError) as other:
                    state += f" ({other})"
            raise NotLoadedError(
                f"rollout server {self.url} did not take weights {label}: {error}; {state}."
            ) from error


@contextmanager
def _broken_is_lost() -> Iterator[None]:
    """Turn 5xx answers into `LostError`: a dead engine answers 500 until it exits, a bad request gets a 4xx."""
    try:
        yield
    except RefusedError as error:
        if error.code < 500:
            raise
        raise LostError(str(error)) from error
