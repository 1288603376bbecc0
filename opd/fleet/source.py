"""`ScoreSource`: what a trainer needs from whatever scores its rows, be it a live fleet or a record of one."""

import asyncio
import concurrent.futures
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from opd.fleet.membership.agreement import AgreementReport
from opd.fleet.membership.outage import Outage, OutageHooks
from opd.fleet.status.records import FleetStatus
from opd.fleet.weights import WeightsUpdate
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

ScoreFuture = concurrent.futures.Future[Scores]


class ScoreSource(Protocol):
    """Scores rows. `TeacherFleet` asks servers and `RecordedFleet` reads a store; both inherit from this class.

    Attributes:
        recorded: whether the scores come from a store, which has only rows that were recorded and so no test rows.
    """

    recorded: bool

    @abstractmethod
    def teachers(self) -> dict[str, pb.TeacherInfo]:
        """The teachers by name, each with the strictest limits among its replicas."""

    @abstractmethod
    def describe(self, teacher: str) -> pb.TeacherInfo:
        """The description of one teacher.

        Raises:
            TeacherNotFoundError: if there is no such teacher.
            UnavailableError: if no replica of it was ever usable.
        """

    @abstractmethod
    def submit_many(
        self,
        teacher: str,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        *,
        temperature: float = 1.0,
        groups: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> list[ScoreFuture]:
        """Score many rows in the background.

        A future gets its scores exactly once, whichever replica, attempt or hedge they come from. Cancelling it
        withdraws the row.

        Args:
            teacher: its name.
            items: the rows: ids, prompt length and, for payload gather, the ids to gather.
            spec: the payload.
            temperature: divides the logits before normalisation; not applied to hidden states.
            groups: a name per row; rows of one prompt share a group, so that a server can share the prompt's
                computation.
            deadline: seconds from now after which a row fails with `DeadlineError`; None for the settings' default.

        Returns:
            One future per row, in order.

        Raises:
            TeacherNotFoundError, InvalidRequestError, IncompatibleTeacherError: if a row can never be scored.
        """

    @abstractmethod
    def wait(self, futures: Sequence[ScoreFuture], hooks: OutageHooks | None = None) -> list[Scores]:
        """Wait for rows; outages are reported to the caller, in its own thread.

        Args:
            futures: from `submit` or `submit_many`.
            hooks: what to call if a teacher that is waited for cannot serve; see `OutageHooks`.

        Returns:
            The scores, in the order of `futures`.

        Raises:
            OpdError: from the first row that failed; rows that still wait are withdrawn.
            concurrent.futures.CancelledError: if a row was withdrawn meanwhile, for example by another thread.
        """

    @abstractmethod
    def head(self, teacher: str) -> Head:
        """The teacher's output head, for hidden states; fetched once and kept until its content hash changes.

        Raises:
            TeacherNotFoundError: if there is no such teacher, or it does not serve its head.
            OpdError: from the last replica that was asked.
        """

    def tokens(self, teacher: str, start: int) -> Sequence[bytes]:
        """Bytes of some of the teacher's tokens, from id `start` on; none beyond its last, or if they are not known."""
        return ()

    def tokenizer(self, teacher: str) -> bytes:
        """What the teacher's tokenizer is made of, a document of `opd.wire.tokenizer`; empty if it is not known.

        Raises:
            IncompatibleTeacherError: if its servers cannot send it, or are too old to know the call.
        """
        return b""

    @abstractmethod
    def verify(self, teacher: str) -> AgreementReport:
        """Score a test row on every replica now, and report the largest |d log p| to the pool in nats."""

    @abstractmethod
    def adopt(self, teacher: str, weights_hash: str = "") -> None:
        """Accept the weights that the teacher's servers have now, after another client swapped them on purpose.

        All replicas are checked again, the first one only against itself. Until one has passed, rows wait as in an
        outage.

        Args:
            teacher: its name.
            weights_hash: the only weights to accept (`WeightsUpdate.weights_hash`); "" accepts those of the first
                replica.
        """

    @abstractmethod
    def update_weights(self, teacher: str, folder: str | Path, *, timeout: float = 600.0) -> WeightsUpdate:
        """Replace a teacher's weights on every replica while it serves, and wait until the replicas agree.

        Rows in flight are scored with the old weights or sent again; rows that wait while the replicas are checked are
        scored with the new ones. Call it between two steps, so that no step mixes both.

        Args:
            teacher: its name.
            folder: safetensors of the same architecture, at a path that every server can read.
            timeout: seconds that one replica's swap may take.

        Returns:
            Which replicas serve the new weights, and for each other one why it does not.

        Raises:
            TeacherNotFoundError: if there is no such teacher.
            IncompatibleTeacherError: if replicas found different weights in the folder and there is no majority.
            OpdError: if no replica took the weights (no scope `admin`, an unreadable folder, another architecture); the
                old weights stay in use.
        """

    def settle(self, seconds: float | None = None, *, poll: Callable[[], None] | None = None) -> bool:
        """Wait until the replicas on all servers that answer have been checked; returns False if that takes too long.

        `connect` returns with the first usable replica of every teacher; the others are checked while rows are scored.

        Args:
            seconds: how long to wait; None for the settings' `connect_seconds`.
            poll: called twice a second while waiting; may raise to give up.
        """
        return True

    @abstractmethod
    def outages(self) -> list[Outage]:
        """Teachers with waiting rows but without a replica that takes them at present."""

    @abstractmethod
    def status(self) -> FleetStatus:
        """A snapshot: teachers, replicas, queues, throughputs, counters."""

    @abstractmethod
    def observe(self, watcher: Callable[[str, float], None]) -> None:
        """Call `watcher(teacher, seconds from submission to scores)` for every answered row; it must return quickly."""

    @abstractmethod
    def close(self) -> None:
        """Cancel what runs, fail what waits, and free everything. May be called twice."""

    def submit(
        self,
        teacher: str,
        item: ScoreItem,
        spec: PayloadSpec,
        *,
        temperature: float = 1.0,
        group: str = "",
        deadline: float | None = None,
    ) -> ScoreFuture:
        """Score one row; see `submit_many`."""
        return self.submit_many(teacher, [item], spec, temperature=temperature, groups=[group], deadline=deadline)[0]

    def score(
        self,
        teacher: str,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        *,
        temperature: float = 1.0,
        groups: Sequence[str] | None = None,
        deadline: float | None = None,
        hooks: OutageHooks | None = None,
    ) -> list[Scores]:
        """Score rows and wait for all of them; see `submit_many` and `wait`.

        Returns:
            One `Scores` per item, in order.
        """
        futures = self.submit_many(teacher, items, spec, temperature=temperature, groups=groups, deadline=deadline)
        return self.wait(futures, hooks)

    async def ascore(
        self,
        teacher: str,
        items: Sequence[ScoreItem],
        spec: PayloadSpec,
        *,
        temperature: float = 1.0,
        groups: Sequence[str] | None = None,
        deadline: float | None = None,
    ) -> list[Scores]:
        """Like `score`, from a coroutine on any loop; cancelling it withdraws the rows."""
        futures = self.submit_many(teacher, items, spec, temperature=temperature, groups=groups, deadline=deadline)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(future) for future in futures)))
        finally:
            cancel_all(futures)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def cancel_all(futures: Iterable[ScoreFuture]) -> None:
    """Withdraw the rows that still wait."""
    for future in futures:
        future.cancel()
