"""The thread that owns one engine: it takes batches from the queue, runs them, and does what must not overlap them.

Only this thread calls the engine, so weights change between batches and never during one. A batch that fails is
repeated in parts, so that a bad request fails alone. Failures that no request has caused are counted; after a few in a
row, or when the thread itself dies, the engine is reported dead. A sequence too long for the device's memory does not
count: clients could end the server with it.

`_condition` guards the queue, the tasks and `dead`; callbacks (`post`, `on_batch`) are always called without it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from opd.errors import CancelledError, DeadlineError, DeviceMemoryError, OpdError, UnavailableError
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from teacher_server.batching.client import Client
from teacher_server.batching.queue import FairQueue, SequenceJob
from teacher_server.engines.base import Engine, EngineItem
from teacher_server.faults import FaultPoints
from teacher_server.observe.logs import describe_error

_log = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3

AWAY_SECONDS = 30.0
"""An engine that has reported nothing but UnavailableError for so long is dead."""

RATE_DECAY = 0.8
R = TypeVar("R")


class DeviceTurn:
    """A first-come-first-served lock, by which teachers on one device take turns.

    `threading.Lock` makes no promise about order: a busy teacher that releases and takes it again could starve others.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: deque[object] = deque()

    def __enter__(self) -> None:
        ticket = object()
        with self._condition:
            self._waiting.append(ticket)  # the holder's ticket stays in front until it leaves
            self._condition.wait_for(lambda: self._waiting[0] is ticket)

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._waiting.popleft()
            self._condition.notify_all()


class EngineWorker:
    """Runs one engine on a thread of its own.

    Args:
        name: of the teacher, for messages and the thread's name.
        engine: used by this thread alone from now on.
        turn: shared by the workers of one device.
        max_batch_tokens: tokens of a batch.
        max_batch_sequences: sequences of a batch.
        faults: named fault points of tests.
        post: runs a function where the callers are; so `deliver` of all jobs of a batch and `on_dead` are called.
        on_dead: called once, with the sentence that says why.
        on_batch: called on this thread after each batch with sequences and tokens scored, and seconds in the engine.

    Attributes:
        tokens_per_second: of the engine lately, 0.0 before the first batch.
        admission_rate: tokens per second by which calls may be refused; the most that may be hoped for until a batch
            was at least half full.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        turn: DeviceTurn,
        *,
        max_batch_tokens: int,
        max_batch_sequences: int,
        faults: FaultPoints,
        post: Callable[[Callable[[], None]], None],
        on_dead: Callable[[str], None],
        on_batch: Callable[[int, int, float], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self.tokens_per_second = 0.0
        self.admission_rate = 0.0
        self.running_tokens = 0
        self.busy_since = 0.0
        self.dead = ""
        self._turn = turn
        self._max_tokens = max_batch_tokens
        self._max_sequences = max_batch_sequences
        self._faults = faults
        self._post = post
        self._on_dead = on_dead
        self._on_batch = on_batch
        self._queue = FairQueue(time.monotonic)
        self._tasks: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._failures = 0
        self._seen_full = False
        self._away_since = 0.0
        # Last: the thread uses all of the above from its first moment.
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[SequenceJob]) -> None:
        """Queue jobs.

        Raises:
            UnavailableError: when the engine is dead or closing.
        """
        with self._condition:
            if self.dead or self._closing:
                raise UnavailableError(f"teacher {self.name!r} is not running: {self.dead or 'it is unloaded'}.")
            for job in jobs:
                self._queue.add(job)
            self._condition.notify()

    def cancel(self, jobs: Sequence[SequenceJob]) -> None:
        """Drop jobs that wait; a running job is skipped where the engine polls `EngineItem.cancelled`."""
        with self._condition:
            for job in jobs:
                job.cancelled = True
            # Now, not when their turn comes: they hold ids, and the load that clients see counts them.
            self._queue.purge()

    def call(self, function: Callable[[Engine], R]) -> "Future[R]":
        """Run `function(engine)` between batches, before any that waits."""
        future: Future[R] = Future()
        with self._condition:
            if self.dead or self._closing:
                future.set_exception(UnavailableError(f"teacher {self.name!r} is not running."))
            else:
                self._tasks.append((function, future))
                self._condition.notify()
        return future

    def load(self) -> tuple[int, int, int]:
        """Sequences waiting, tokens waiting, tokens in the engine."""
        with self._condition:
            return self._queue.sequences, self._queue.tokens, self.running_tokens

    def before(self, client: Client, tokens: int) -> int:
        """Tokens that the engine has or takes before the last of `tokens` more of a client, were they queued now."""
        with self._condition:
            return self.running_tokens + self._queue.before(client, tokens)

    def stalled(self, limit: float) -> bool:
        """Whether a batch or task has run longer than `limit` seconds."""
        since = self.busy_since  # read once: the worker's thread may set it to 0 between two reads
        return since > 0 and time.monotonic() - since > limit

    def close(self, timeout: float = 10.0) -> bool:
        """Stop after the current batch; what waits is cancelled. Returns whether the thread ended in time."""
        with self._condition:
            self._closing = True
            waiting = self._queue.drain()
            self._condition.notify()
        self._refuse(waiting, CancelledError(f"teacher {self.name!r} was unloaded."))
        if threading.current_thread() is not self._thread:  # a thread cannot join itself
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._work():
                pass
            self.engine.close()
        except BaseException as error:
            with contextlib.suppress(Exception):
                self.engine.close()
            self._die(f"its thread died of {type(error).__name__}: {error}")

    def _work(self) -> bool:
        """Do what is due next; False when the thread should end.

        In a frame of its own, so that while the thread waits for work no local variable keeps the last scores alive.
        """
        task, batch, expired = self._next()
        self._refuse(expired, DeadlineError("the deadline passed while the request was queued."))
        if task is not None:
            self._run_task(*task)
        if batch:
            self._run_batch(batch)
        return task is not None or bool(batch or expired)

    def _next(self) -> tuple[tuple[Callable[[Engine], Any], Future[Any]] | None, list[SequenceJob], list[SequenceJob]]:
        with self._condition:
            self.busy_since = 0.0
            while True:
                if self._closing or self.dead:
                    self._refuse_tasks()
                    return None, [], []
                # Tasks first: a swap or an unload waits for the batch in hand, and not for the queue.
                if self._tasks:
                    self.busy_since = time.monotonic()
                    return self._tasks.popleft(), [], []
                batch, expired = self._queue.take(self._max_tokens, self._max_sequences)
                if batch or expired:
                    self.busy_since = time.monotonic()
                    self.running_tokens = sum(job.tokens for job in batch)
                    return None, batch, expired
                self._condition.wait()

    def _refuse_tasks(self) -> None:
        for _, future in self._tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError(f"teacher {self.name!r} is not running."))
        self._tasks.clear()

    def _run_task(self, function: Callable[[Engine], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with self._turn:
                result = function(self.engine)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else self._gone())
            if not isinstance(error, Exception):  # SystemExit and its like end the thread, after the caller was told
                raise
        else:
            future.set_result(result)

    def _gone(self) -> UnavailableError:
        return UnavailableError(f"teacher {self.name!r} failed while it worked on this.")

    def _run_batch(self, batch: list[SequenceJob]) -> None:
        with self._turn:
            # Waiting for the device is not running: only a batch that holds it can stall.
            self.busy_since = time.monotonic()
            started = time.monotonic()
            for job in batch:
                job.started_at = started
            try:
                results = self._score(batch)
            except BaseException:  # a library ends the thread: every job has a caller that waits, so answer first
                self._refuse(batch, self._gone())
                raise
            ended = time.monotonic()
        seconds = ended - started
        # What failed or was cancelled was not computed to its end: its tokens would pass for an engine of any speed.
        scored = [job.tokens for job, result in zip(batch, results, strict=True) if isinstance(result, Scores)]
        if scored:
            self._learn_rate(len(scored), sum(scored), seconds)
        self.running_tokens = 0
        # Not of a later swap: those run on this thread too, between batches.
        weights_hash = self.engine.info.weights_hash
        for job in batch:  # before any is delivered: a call sends what it has only when there is something to wait for
            job.ended_at = ended
        answers = deque(zip(batch, results, strict=True))
        del results  # no frame of this thread keeps scores that a call has sent
        self._deliver(answers, weights_hash)
        self._on_batch(len(scored), sum(scored), seconds)

    def _refuse(self, jobs: Sequence[SequenceJob], error: Exception) -> None:
        if jobs:
            self._deliver(deque((job, error) for job in jobs), "")

    def _deliver(self, answers: deque[tuple[SequenceJob, Scores | Exception]], weights_hash: str) -> None:
        """In one piece: each wake-up of an event loop is a system call, and takes the interpreter from this thread."""

        def deliver() -> None:
            while answers:
                job, result = answers.popleft()
                job.deliver(job, result, weights_hash)

        self._post(deliver)

    def _learn_rate(self, sequences: int, tokens: int, seconds: float) -> None:
        """Average the rate over batches at least half full, of either; a smaller one counts only when it was faster.

        Small batches leave the device idle: their rate would make admission refuse what a full batch does in time.
        """
        rate, known = tokens / max(seconds, 1e-6), self.tokens_per_second
        full = 2 * tokens >= self._max_tokens or 2 * sequences >= self._max_sequences
        if full and self._seen_full:
            self.tokens_per_second = RATE_DECAY * known + (1 - RATE_DECAY) * rate
        else:
            self.tokens_per_second = rate if full else max(rate, known)
        self._seen_full = self._seen_full or full
        # Before any was nearly full, the largest may take no longer than this one, for all that is known.
        most = max(self.admission_rate, self._max_tokens / max(seconds, 1e-6))
        self.admission_rate = self.tokens_per_second if self._seen_full else most

    def _score(self, batch: list[SequenceJob]) -> list[Scores | Exception]:
        """Results of a batch. If it fails as a whole it is repeated in parts, so that only the rows that cause it fail.

        Halves when the device had no memory, since smaller batches may well do; else row by row.
        """
        outcome = self._attempt(batch)
        if isinstance(outcome, list):
            return outcome
        if len(batch) == 1:
            return [self._blame(outcome, batch[0])]
        short = out_of_memory(outcome)
        _log.warning(
            "batch failed and is repeated in parts",
            extra={
                "parts": "halves" if short else "rows",
                "teacher": self.name,
                "sequences": len(batch),
                "tokens": sum(job.tokens for job in batch),
                "error": describe_error(outcome),
            },
        )
        step = -(-len(batch) // 2) if short else 1
        parts = (batch[at : at + step] for at in range(0, len(batch), step))
        return [result for part in parts for result in self._score(part)]

    def _attempt(self, batch: list[SequenceJob]) -> list[Scores | Exception] | Exception:
        try:
            self._faults.reach_sync("engine_start")
            results = self.engine.score([job.item for job in batch])
            self._faults.reach_sync("engine_end")
            if len(results) != len(batch):
                raise RuntimeError(f"the engine returned {len(results)} results for {len(batch)} sequences.")
        except Exception as error:
            # The traceback's frames hold the tensors of the failed attempt, whose memory the next one needs.
            return error.with_traceback(None)
        self._failures, self._away_since = 0, 0.0
        gone = CancelledError("the request was cancelled while it ran.")
        return [gone if scores is None else scores for scores in results]

    def _blame(self, error: Exception, job: SequenceJob) -> Exception:
        """An error of a request is its own; any other counts against the engine."""
        if isinstance(error, UnavailableError):
            self._away(error)
            return error
        if isinstance(error, OpdError):
            return error
        if out_of_memory(error) and self._scores_something():
            _log.warning(
                "no memory for a sequence", extra={"teacher": self.name, "tokens": job.tokens, "text": str(error)[:500]}
            )
            return DeviceMemoryError(
                f"teacher {self.name!r} has no memory for a sequence of {job.tokens} tokens with payload "
                f"{job.item.spec.kind}, even alone; send shorter rows, lower their maximum length, or take a "
                "device with more memory."
            )
        self._failures += 1
        _log.error(
            "engine error", extra={"teacher": self.name, "error": type(error).__name__, "text": str(error)[:500]}
        )
        # After a CUDA error the context is lost: every later call in this process fails.
        if "CUDA error" in str(error) or self._failures >= MAX_CONSECUTIVE_FAILURES:
            self._die(f"the engine failed with {type(error).__name__}: {error}")
        return error

    def _away(self, error: UnavailableError) -> None:
        """Count an UnavailableError: an engine in another process may come back; if it stays away it is dead."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since >= AWAY_SECONDS:
            self._die(f"the engine was away for {now - self._away_since:.0f} s: {error}")

    def _scores_something(self) -> bool:
        """Whether the engine still scores the shortest sequence: then the other was too long for the device."""
        kinds = self.engine.info.payloads
        spec = PayloadSpec.sampled() if PayloadKind.SAMPLED in kinds else PayloadSpec.hidden()
        try:
            return self.engine.score([EngineItem(ScoreItem(np.zeros(2, np.uint32), 1), spec)])[0] is not None
        except Exception as error:
            _log.error("engine no longer scores", extra={"teacher": self.name, "error": describe_error(error)})
            return False

    def _die(self, reason: str) -> None:
        """Fail what waits and tell the owner, once: the owner may have a new worker by the time of a second report."""
        with self._condition:
            if self.dead:
                return
            self.dead = reason
            self._refuse_tasks()
            waiting = self._queue.drain()
        self._refuse(waiting, UnavailableError(f"teacher {self.name!r} failed: {reason}."))
        self._post(lambda: self._on_dead(reason))


def out_of_memory(error: Exception) -> bool:
    """Whether an engine ran out of memory, by the texts of torch, CUDA and cuBLAS: they share no exception class."""
    text = str(error)
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return named or any(sign in text for sign in signs)
