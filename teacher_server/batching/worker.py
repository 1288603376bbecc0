"""The thread that owns an engine: it takes batches from the queue, runs them, and runs tasks between them.

Only this thread calls the engine, so weights change between batches and never during one. A batch that fails is
repeated in parts, so that a bad request fails alone. Failures that no request has caused are counted; after a few in a
row, or if the thread itself dies, the engine is reported dead. A sequence too long for the device's memory does not
count, or clients could bring the server down with it.

`_condition` guards the queue, the tasks and `dead`; callbacks (`post`, `on_batch`) are called without holding it.
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
from teacher_server.batching.admission import Client
from teacher_server.batching.device import DeviceTurn, Rate
from teacher_server.batching.queue import FairQueue, SequenceJob
from teacher_server.engines.base import Engine, EngineItem
from teacher_server.observe.logs import describe_error

_log = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3

AWAY_SECONDS = 30.0
"""Seconds of nothing but UnavailableError after which an engine counts as dead."""

R = TypeVar("R")
Task = tuple[Callable[[Engine], Any], Future[Any]]


class EngineWorker:
    """Runs an engine on a thread of its own.

    Args:
        name: the teacher's name, for messages and the name of the thread.
        engine: the engine, which only this thread may use from now on.
        turn: the lock that the workers of a device share.
        max_batch_tokens: most tokens in a batch.
        max_batch_sequences: most sequences in a batch.
        post: runs a function on the callers' side; it is used for `on_dead` and the `deliver` of a batch's jobs.
        on_dead: called once with the reason, if the engine is dead.
        on_batch: called on this thread after each batch, with the sequences and tokens scored and the engine's seconds.

    Attributes:
        rate: the engine's throughput.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        turn: DeviceTurn,
        *,
        max_batch_tokens: int,
        max_batch_sequences: int,
        post: Callable[[Callable[[], None]], None],
        on_dead: Callable[[str], None],
        on_batch: Callable[[int, int, float], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self.rate = Rate(max_batch_tokens, max_batch_sequences)
        self.running_tokens = 0
        self.busy_since = 0.0
        self.dead = ""
        self._turn = turn
        self._max_tokens = max_batch_tokens
        self._max_sequences = max_batch_sequences
        self._post = post
        self._on_dead = on_dead
        self._on_batch = on_batch
        self._queue = FairQueue(time.monotonic)
        self._tasks: deque[Task] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._failures = 0
        self._away_since = 0.0
        # Last: the thread uses all of the above from its first moment.
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def submit(self, jobs: Sequence[SequenceJob]) -> None:
        """Queue jobs.

        Raises:
            UnavailableError: if the engine is dead or closing.
        """
        with self._condition:
            if self.dead or self._closing:
                raise UnavailableError(f"teacher {self.name!r} is not running: {self.dead or 'it is unloaded'}.")
            for job in jobs:
                self._queue.add(job)
            self._condition.notify()

    def cancel(self, jobs: Sequence[SequenceJob]) -> None:
        """Drop jobs that wait; a job that runs is skipped if the engine polls `EngineItem.cancelled`."""
        with self._condition:
            for job in jobs:
                job.cancelled = True
            # Now instead of when their turn comes: they hold their ids, and count in the load that clients see.
            self._queue.purge()

    def call(self, function: Callable[[Engine], R]) -> "Future[R]":
        """Run `function(engine)` after the current batch, before any that waits."""
        future: Future[R] = Future()
        with self._condition:
            if self.dead or self._closing:
                future.set_exception(UnavailableError(f"teacher {self.name!r} is not running."))
            else:
                self._tasks.append((function, future))
                self._condition.notify()
        return future

    def load(self) -> tuple[int, int, int]:
        """Sequences in the queue, tokens in the queue, tokens in the engine."""
        with self._condition:
            return self._queue.sequences, self._queue.tokens, self.running_tokens

    def before(self, client: Client, tokens: int) -> int:
        """Tokens that the engine has, or takes before the last of `tokens` more of a client, were they queued now."""
        with self._condition:
            return self.running_tokens + self._queue.before(client, tokens)

    def stalled(self, limit: float) -> bool:
        """Whether a batch or task has waited for the device, or a batch has run, longer than `limit` seconds."""
        since = self.busy_since  # read once: the worker's thread may set it to 0 in between
        return since > 0 and time.monotonic() - since > limit

    def close(self, timeout: float = 10.0) -> bool:
        """Stop after the current batch and cancel what waits; returns whether the thread ended in `timeout` seconds."""
        with self._condition:
            self._closing = True
            waiting = self._queue.drain()
            self._condition.notify()
        self._refuse(waiting, CancelledError(f"teacher {self.name!r} was unloaded before it scored this."))
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
            self._die(f"its thread ended with {type(error).__name__}: {error}")

    def _work(self) -> bool:
        """Do what is due next; False if the thread should end.

        In a function of its own, so that no local variable keeps the last scores alive while the thread waits for work.
        """
        self.busy_since = 0.0
        if (due := self._next()) is None:
            return False
        self.busy_since = time.monotonic()
        task, batch, expired = due
        self._refuse(expired, DeadlineError("the deadline passed while the request was queued; allow more time."))
        if task is not None:
            self._run_task(*task)
        if batch:
            self._run_batch(batch)
        return True

    def _next(self) -> tuple[Task | None, list[SequenceJob], list[SequenceJob]] | None:
        """Wait for a task, or a batch and the jobs that expired; None if the thread should end."""
        with self._condition:
            while True:
                if self._closing or self.dead:
                    self._refuse_tasks()
                    return None
                # Tasks first: a swap or an unload waits for the batch that is running, not for the queue.
                if self._tasks:
                    return self._tasks.popleft(), [], []
                batch, expired = self._queue.take(self._max_tokens, self._max_sequences)
                if batch or expired:
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
            if not isinstance(error, Exception):  # SystemExit and the like end the thread, once the caller knows
                raise
        else:
            future.set_result(result)

    def _gone(self) -> UnavailableError:
        return UnavailableError(f"the engine of teacher {self.name!r} ended while it scored this; send it again.")

    def _run_batch(self, batch: list[SequenceJob]) -> None:
        with self._turn:
            self.busy_since = started = time.monotonic()  # the wait for the device is not counted as the batch's own
            for job in batch:
                job.started_at = started
            try:
                results = self._score(batch)
                # Read before delivery: this thread also performs swaps, between batches.
                weights_hash = self.engine.info.weights_hash
            except BaseException:  # a library ends the thread: every job has a caller that waits, so tell them first
                self._refuse(batch, self._gone())
                raise
            ended = time.monotonic()
        seconds = ended - started
        # What failed or was cancelled was not computed to its end, and would make the engine look faster than it is.
        scored = [job.tokens for job, result in zip(batch, results, strict=True) if isinstance(result, Scores)]
        if scored:
            self.rate.learn(len(scored), sum(scored), seconds)
        self.running_tokens = 0
        for job in batch:  # all before any is delivered: a call holds back what it has while its next job has ended
            job.ended_at = ended
        answers = deque(zip(batch, results, strict=True))
        del results  # this thread must not keep scores alive that a call has sent
        self._deliver(answers, weights_hash)
        self._on_batch(len(scored), sum(scored), seconds)

    def _refuse(self, jobs: Sequence[SequenceJob], error: Exception) -> None:
        if jobs:
            self._deliver(deque((job, error) for job in jobs), "")

    def _deliver(self, answers: deque[tuple[SequenceJob, Scores | Exception]], weights_hash: str) -> None:
        """Deliver all results in one callback: waking the event loop is a system call and takes the GIL away."""

        def deliver() -> None:
            while answers:
                job, result = answers.popleft()
                job.deliver(job, result, weights_hash)

        self._post(deliver)

    def _score(self, batch: list[SequenceJob]) -> list[Scores | Exception]:
        """The results of a batch. If it fails as a whole it is repeated in parts, so that only the rows at fault fail.

        It is repeated in halves if the device ran out of memory, since smaller batches may fit; otherwise row by row.
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
            results = self.engine.score([job.item for job in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"the engine returned {len(results)} results for {len(batch)} sequences.")
        except Exception as error:
            # The frames of the traceback hold tensors of the failed attempt, whose memory the next attempt needs.
            return error.with_traceback(None)
        self._failures, self._away_since = 0, 0.0
        gone = CancelledError("the request was cancelled while the engine ran it.")
        return [gone if scores is None else scores for scores in results]

    def _blame(self, error: Exception, job: SequenceJob) -> Exception:
        """What to report for a job that failed alone; an error that is not an `OpdError` counts against the engine."""
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
                f"{job.item.spec.kind}, even alone; send shorter sequences, lower limits.max_sequence_tokens, or use a "
                "device with more memory."
            )
        self._failures += 1
        _log.error(
            "engine error", extra={"teacher": self.name, "error": type(error).__name__, "text": str(error)[:500]}
        )
        # A CUDA error destroys the context, so every later call in this process would fail.
        if "CUDA error" in str(error) or self._failures >= MAX_CONSECUTIVE_FAILURES:
            self._die(f"the engine failed with {type(error).__name__}: {error}")
        return error

    def _away(self, error: UnavailableError) -> None:
        """Count an UnavailableError: an engine in another process may come back; if it stays away, it is dead."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since >= AWAY_SECONDS:
            self._die(f"the engine was unavailable for {now - self._away_since:.0f} s: {error}")

    def _scores_something(self) -> bool:
        """Whether the engine still scores the shortest sequence; if so, the other was too long for the device."""
        kinds = self.engine.info.payloads
        spec = PayloadSpec.sampled() if PayloadKind.SAMPLED in kinds else PayloadSpec.hidden()
        try:
            return self.engine.score([EngineItem(ScoreItem(np.zeros(2, np.uint32), 1), spec)])[0] is not None
        except Exception as error:
            _log.error("engine no longer scores", extra={"teacher": self.name, "error": describe_error(error)})
            return False

    def _die(self, reason: str) -> None:
        """Fail what waits and tell the owner, once: by a second report the owner might have a new worker already."""
        with self._condition:
            if self.dead:
                return
            self.dead = reason
            self._refuse_tasks()
            waiting = self._queue.drain()
        self._refuse(waiting, UnavailableError(f"teacher {self.name!r} failed: {reason}."))
        self._post(lambda: self._on_dead(reason))


def out_of_memory(error: Exception) -> bool:
    """Whether an engine ran out of memory, judged by the messages of torch, CUDA and cuBLAS, which share no class."""
    text = str(error)
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return named or any(sign in text for sign in signs)
