"""`TeacherFleet`: the whole fleet as one object, for synchronous and asynchronous Python, from any thread.

with TeacherFleet.connect("10.0.0.1:7070,10.0.0.2:7070") as fleet:
    scores = fleet.score("math", items, PayloadSpec.topk(64))
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from opd.errors import OpdError, UnavailableError
from opd.fleet.core import FleetCore
from opd.fleet.membership.agreement import AgreementReport
from opd.fleet.membership.discovery import parse_endpoints, recorded_folder
from opd.fleet.membership.grpc_link import GrpcLink
from opd.fleet.membership.link import LinkFactory, ReplicaLink
from opd.fleet.membership.outage import Outage, OutageHooks, OutageWatch
from opd.fleet.record.cache import CachedScores
from opd.fleet.record.recorded import RecordedFleet
from opd.fleet.record.store import ScoreStore
from opd.fleet.scheduling.in_flight import ScoreTask
from opd.fleet.settings import FleetSettings
from opd.fleet.source import ScoreFuture, ScoreSource, cancel_all
from opd.fleet.status.records import FleetStatus
from opd.fleet.weights import WeightsUpdate
from opd.telemetry.tracing import trace_metadata
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

T = TypeVar("T")

_WAIT_SECONDS = 0.5


class TeacherFleet(ScoreSource):
    """The client of all teachers, usable from any thread; the methods are documented in `ScoreSource`.

    Create it with `connect`, and close it or use it in a `with` statement.
    """

    recorded = False

    def __init__(self, core: FleetCore, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
        self._core = core
        self._loop = loop
        self._thread = thread
        self._closed = False
        self._process = os.getpid()
        self._entering = threading.Lock()  # whatever enters the loop does so before `close`, or is refused
        cache = core.settings.cache
        self._cache = None if cache.folder is None else CachedScores(ScoreStore(cache.folder, cache.max_bytes))

    @classmethod
    def connect(
        cls,
        endpoints: str | Sequence[str] | Mapping[str, Sequence[str]],
        *,
        settings: FleetSettings | None = None,
        client: str = "student",
        link: LinkFactory | None = None,
        poll: Callable[[], None] | None = None,
        look: bool = False,
    ) -> ScoreSource:
        """Find the servers, learn which teachers they serve, and check that the replicas of a teacher are the same.

        Args:
            endpoints: "host:port", several of them (a list, or one string with commas), "file:PATH" (read again when it
                changes), "dns:NAME:PORT"; a mapping from teacher name to the endpoints at which it may be used; or
                "store:FOLDER", a store of recorded scores, which needs no server.
            settings: the fleet's settings; None for the defaults.
            client: name for fair queueing and logs on the servers, at most 64 characters of [A-Za-z0-9._-].
            link: makes the connection to an address; None for gRPC.
            poll: called twice a second while servers are waited for; may raise to give up.
            look: only to see what there is: servers that do not answer, teachers without a usable replica, or whose
                replicas differ, do not raise.

        Returns:
            A `TeacherFleet`, or a `RecordedFleet` for "store:FOLDER".

        Raises:
            ConfigError: if an endpoint is malformed.
            UnavailableError, AuthError: if no server answers, or a teacher named in `endpoints` is not usable.
            TeacherNotFoundError: if a teacher named in `endpoints` is not served.
            IncompatibleTeacherError: if no replica of a teacher has the expected weights.
            UndecidedTeacherError: if the replicas of a teacher differ and no side has a majority.
        """
        settings = settings or FleetSettings()
        folder = recorded_folder(endpoints)
        if folder is not None:
            return RecordedFleet(folder)
        sources = parse_endpoints(endpoints)

        def over_grpc(address: str) -> ReplicaLink:
            return GrpcLink(address, settings.security, settings.calls, client)

        # With a loop and a thread of its own: callers have no loop, or block theirs while they train.
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(loop,), name="opd-fleet", daemon=True)
        thread.start()

        async def make() -> FleetCore:
            core = FleetCore(sources, link or over_grpc, settings, client)
            try:
                await core.connect(look=look)
            except BaseException:
                # Its monitors are running by now, and would ping for as long as the process lives.
                await core.close()
                raise
            return core

        # On Ctrl-C too, because the caller has no fleet yet with which to end the thread and its connections.
        try:
            core = _result(asyncio.run_coroutine_threadsafe(make(), loop), poll)
        except BaseException:
            _end_loop(loop, thread)
            raise
        return cls(core, loop, thread)

    def teachers(self) -> dict[str, pb.TeacherInfo]:
        return dict(self._on_loop(self._core.infos))

    def describe(self, teacher: str) -> pb.TeacherInfo:
        info = self._on_loop(lambda: self._core.known(teacher).info)
        if info is None:
            raise UnavailableError(
                f"no replica of teacher {teacher!r} has passed its check yet; see `opd fleet status`."
            )
        return info

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
        """See `ScoreSource.submit_many`; the scheduler sees all rows at once."""
        if groups is not None and len(groups) != len(items):
            raise ValueError(f"groups has {len(groups)} entries for {len(items)} items; give one per item")
        self._core.check(teacher, items, spec, temperature)
        futures: list[ScoreFuture] = [concurrent.futures.Future() for _ in items]
        if self._cache is not None:
            self._cache.look_up(self._core.known(teacher).info_now, items, spec, temperature, futures)

        # The caller's span is read here: the fleet's own thread has none.
        trace = trace_metadata()

        def enter() -> None:
            tasks = []
            for index, (item, future) in enumerate(zip(items, futures, strict=True)):
                if future.cancelled():  # before the loop reached it
                    future.set_running_or_notify_cancel()
                if future.done():  # or found in the cache
                    continue
                group = groups[index] if groups is not None else ""
                deliver = _deliver_to(future)
                task = self._core.make_task(teacher, item, spec, temperature, group, deadline, deliver, trace)
                tasks.append(task)
                # Only now: a cancellation is posted to the loop, so it always finds a submitted task.
                future.add_done_callback(lambda done, task=task: self._withdraw(done, task))  # type: ignore[misc]
            self._core.dispatcher.submit(tasks)

        self._call_soon(enter)
        return futures

    def wait(self, futures: Sequence[ScoreFuture], hooks: OutageHooks | None = None) -> list[Scores]:
        watch = OutageWatch(self._core.settings.outage, hooks or OutageHooks())
        waiting: set[ScoreFuture] = set(futures)
        try:
            while waiting:
                # With a timeout, so that outages are reported from this thread even if nothing arrives.
                done, waiting = concurrent.futures.wait(
                    waiting, timeout=_WAIT_SECONDS, return_when=concurrent.futures.FIRST_EXCEPTION
                )
                for future in done:
                    future.result()  # raises the error of a row that failed
                watch.see(self.outages() if waiting else [])
            return [future.result() for future in futures]
        finally:
            # After an error the other rows are of no use, so servers need not compute them.
            cancel_all(futures)

    def head(self, teacher: str) -> Head:
        head = self._core.head_here(teacher)  # trainers ask for every row, so a known head must not wait for the loop
        if head is None:
            head = self._run(self._core.head(teacher))
            if self._cache is not None:
                self._cache.keep_head(head)
        return head

    def tokens(self, teacher: str, start: int) -> Sequence[bytes]:
        return self._run(self._core.tokens(teacher, start))

    def tokenizer(self, teacher: str) -> bytes:
        document = self._run(self._core.tokenizer(teacher))
        if self._cache is not None:
            self._cache.keep_tokenizer(self.describe(teacher).tokenizer.fingerprint, document)
        return document

    def verify(self, teacher: str) -> AgreementReport:
        return self._run(self._core.verify(teacher))

    def adopt(self, teacher: str, weights_hash: str = "") -> None:
        self._on_loop(lambda: self._core.adopt(teacher, weights_hash))

    def update_weights(self, teacher: str, folder: str | Path, *, timeout: float = 600.0) -> WeightsUpdate:
        return self._run(self._core.update_weights(teacher, str(folder), timeout))

    def settle(self, seconds: float | None = None, *, poll: Callable[[], None] | None = None) -> bool:
        limit = self._core.settings.connect_seconds if seconds is None else seconds
        return self._run(self._core.members.settle(limit), poll)

    def outages(self) -> list[Outage]:
        return self._on_loop(self._core.dispatcher.outages)

    def status(self) -> FleetStatus:
        status = self._on_loop(self._core.status)
        if self._cache is not None:
            status.counters.cache_hits, status.counters.cache_misses = self._cache.hits, self._cache.misses
        return status

    def observe(self, watcher: Callable[[str, float], None]) -> None:
        self._core.dispatcher.observe = lambda task, scores, seconds: watcher(task.teacher, seconds)

    def close(self) -> None:
        if self._forked:  # the parent process still uses it
            return
        with self._entering:
            if self._closed:
                return
            self._closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._core.close(), self._loop).result(timeout=30)
        finally:
            _end_loop(self._loop, self._thread)
            if self._cache is not None:
                self._cache.close()

    def _withdraw(self, future: ScoreFuture, task: ScoreTask) -> None:
        if future.cancelled() and not self._closed:
            self._call_soon(lambda: self._core.dispatcher.cancel(task))

    @property
    def _forked(self) -> bool:
        """Whether this is a forked child of the process that connected; it lacks the thread and would wait forever."""
        return self._process != os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a fleet cannot be sent to another process; send its endpoints and connect there.")

    def _call_soon(self, function: Callable[[], None]) -> None:
        if self._forked:  # checked before the lock, which another thread may have held at the fork
            raise _in_a_child()
        with self._entering:
            if self._closed:
                raise _closed()
            self._loop.call_soon_threadsafe(function)

    def _on_loop(self, function: Callable[[], T]) -> T:
        """The result of a function that reads or changes the core's state, which belongs to the loop's thread."""

        async def call() -> T:
            return function()

        return self._run(call())

    def _run(self, coroutine: Coroutine[Any, Any, T], poll: Callable[[], None] | None = None) -> T:
        if self._forked:
            coroutine.close()
            raise _in_a_child()
        with self._entering:
            if self._closed:
                coroutine.close()  # else Python warns that it was never awaited
                raise _closed()
            running = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return _result(running, poll)
        except concurrent.futures.CancelledError as error:  # by `_run_loop`: another thread has closed the fleet
            raise _closed() from error


def _result(running: concurrent.futures.Future[T], poll: Callable[[], None] | None) -> T:
    """The result of what runs on the loop; until it is there, `poll` is called twice a second.

    If `poll` raises, what runs is cancelled.
    """
    try:
        while poll is not None and not concurrent.futures.wait([running], _WAIT_SECONDS).done:
            poll()
    except BaseException:
        running.cancel()
        raise
    return running.result()


def _in_a_child() -> UnavailableError:
    return UnavailableError("the fleet was connected before this process was forked; connect in each process.")


def _closed() -> UnavailableError:
    return UnavailableError("the fleet is closed; connect again.")


def _deliver_to(future: ScoreFuture) -> Callable[[Scores | OpdError], None]:
    def deliver(outcome: Scores | OpdError) -> None:
        # The caller may cancel from its own thread at any moment, until the future is running.
        if future.set_running_or_notify_cancel():
            if isinstance(outcome, OpdError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    return deliver


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        # Other threads wait for these (`settle`, a head). Dropped with the loop, they would leave them waiting forever.
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)
