"""One rollout server: whether it answers, and the weights that it holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from opd.errors import RolloutEngineError, one_line
from student.rollout.servers.answer_check import problem_of
from student.rollout.servers.dialect import Answer, Ask, Dialect, Facts
from student.rollout.servers.http import Connection, LostError
from student.rollout.servers.settings import ServersSettings

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

_ANSWER_SECONDS = 60.0  # timeout for calls that a server answers without computing
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading an answer of another form raises."""


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
        known: whether it was found to be usable, see `Pool`.
    """

    def __init__(self, url: str, dialect: Dialect, settings: ServersSettings, *, adapters: bool) -> None:
        self.url, self._dialect, self._settings, self._adapters = url, dialect, settings, adapters
        self.label: str | None = None
        self.lost, self.known = "", False
        self._good: tuple[Path, str] | None = None

    def connect(self, seconds: float | None = None, *, admin: bool = False) -> Connection:
        """A connection with a timeout of `seconds`, or the timeout of a row if None; `admin` for replacing weights."""
        return Connection(self.url, self._settings.api_key(admin=admin), seconds or self._settings.row_seconds)

    def facts(self) -> Facts:
        """What the server reports of itself."""
        with self.connect(min(_ANSWER_SECONDS, self._settings.row_seconds)) as connection:
            return self._dialect.facts(connection, adapters=self._adapters, nccl=self._settings.transfer == "nccl")

    def generate(self, connection: Connection, ask: Ask) -> Answer:
        """See `Dialect.generate`.

        Raises:
            LostError: if the server does not answer, refuses the row, or sends an impossible one.
        """
        with self._bad_answers_are_lost():
            answer = self._dialect.generate(connection, ask, adapters=self._adapters)
            if answer.whole and (problem := problem_of(answer, ask)):
                raise LostError(f"{self.url} sent a row that {problem}")
            return answer

    def update(self, source: Path | HeldWeights, label: str, lock: FileLock) -> bool:
        """Load weights from a folder or from this process into the server, unless it holds them already.

        Returns:
            Whether the server had to load them.

        Raises:
            LostError: if the server does not answer.
            NotLoadedError: if it could not load them; it then holds the previous weights again, or is not used.
        """
        self.label = None
        with self.connect(self._settings.sync_seconds, admin=True) as connection, lock:
            held = self._held()
            if new := label not in held:
                self._load(connection, source, label, held)
        self.label, self.lost = label, ""
        if isinstance(source, Path):  # weights of this process no longer exist once the student has moved on
            self._good = source, label
        return new

    def _held(self) -> frozenset[str]:
        # With a short timeout: a server that accepts connections but hangs would otherwise delay each sync.
        with self._bad_answers_are_lost(), self.connect(min(_ANSWER_SECONDS, self._settings.sync_seconds)) as short:
            return self._dialect.holds(short, adapters=self._adapters)

    def _load(self, connection: Connection, source: Path | HeldWeights, label: str, held: frozenset[str]) -> None:
        if self._adapters and isinstance(source, Path):
            # Only this run's adapter is unloaded; other runs may have adapters on the same server.
            mine = {self._good[1]} if self._good else set()
            try:
                self._dialect.load_adapter(connection, source, label, held & mine)
            except (RolloutEngineError, *MALFORMED) as error:
                raise NotLoadedError(
                    f"rollout server {self.url} did not take adapters {label}: {str(error).rstrip('.')}."
                ) from error
            return
        try:
            if isinstance(source, Path):
                self._dialect.load(connection, source, label)
            else:
                self._dialect.receive(connection, source, label)
        except (RolloutEngineError, *MALFORMED) as error:
            state = "it now holds an incomplete set of weights"
            if self._good is not None and self._good[0].exists():
                try:
                    self._dialect.load(connection, *self._good)
                    state = f"it holds the earlier weights {self._good[1]} again"
                except (RolloutEngineError, LostError, *MALFORMED) as other:
                    state += f" ({other})"
            raise NotLoadedError(
                f"rollout server {self.url} did not take weights {label}: {error}; {state}."
            ) from error

    @contextmanager
    def _bad_answers_are_lost(self) -> Iterator[None]:
        """Turn errors and answers of another form into `LostError`.

        They come from this server or something in front of it, and say nothing about the row or about other servers.
        """
        try:
            yield
        except RolloutEngineError as error:
            raise LostError(str(error).rstrip(".")) from error
        except MALFORMED as error:
            said = f"{self.url} sent an unexpected answer ({type(error).__name__}: {one_line(error, 200)})"
            raise LostError(said) from error
