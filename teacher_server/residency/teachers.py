"""The teachers of a server: loading, unloading, sleeping under a memory budget, replacing weights, restarting.

All methods run on the event loop; what takes time runs on a worker's thread or a loader thread. Requests to an awake
teacher take no lock. Everything else takes locks in this order, which rules out deadlocks: a teacher's `changing`, for
changes of that teacher; the loader's, because models are read one at a time; the memory budget's
(`teacher_server.residency.memory_budget`).
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from opd.errors import (
    IncompatibleTeacherError,
    InvalidRequestError,
    TeacherNotFoundError,
    UnavailableError,
)
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import Engine, Exchange
from teacher_server.residency.loader import Loader, run_to_completion
from teacher_server.residency.memory_budget import MemoryBudget
from teacher_server.residency.starting import EngineFactory, Starter
from teacher_server.residency.teacher import Teacher
from teacher_server.residency.weights import LostWeightsError, prepare, swap
from teacher_server.settings import LimitSettings, TeacherEngineSettings

_log = logging.getLogger(__name__)


class Teachers:
    """The teachers of a server.

    Args:
        factory: builds engines.
        limits: limits on requests and batches.
        engine: settings for residency: memory, restarts, time limits, self-test.
        on_state: awaited after each change of a teacher's state; the state is 0 after it was unloaded.
        on_fatal: called with the reason if the process should end.
        on_batch: called on a worker's thread after each batch, with teacher, sequences, tokens and seconds.
        on_restart: called with the name of a teacher whose engine is dead and is being loaded again.

    Attributes:
        closing: set when the process is about to end, so that threads are no longer waited for.
    """

    def __init__(
        self,
        factory: EngineFactory,
        *,
        limits: LimitSettings,
        engine: TeacherEngineSettings,
        on_state: Callable[[Teacher], Awaitable[None]],
        on_fatal: Callable[[str], None],
        on_batch: Callable[[str, int, int, float], None],
        on_restart: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._settings = engine
        self._on_state = on_state
        self._on_fatal = on_fatal
        self._on_restart = on_restart
        self._teachers: dict[str, Teacher] = {}
        self._memory = MemoryBudget(engine.memory_budget_bytes, lambda: self, self._set_state)
        self._loader = Loader(engine.load_seconds, closing=lambda: self.closing)
        self._starter = Starter(
            factory,
            limits,
            engine,
            loader=self._loader,
            memory=self._memory,
            set_state=self._set_state,
            on_batch=on_batch,
            on_dead=self._dead,
        )
        self._restarts: set[asyncio.Task[None]] = set()
        self.closing = False

    def __iter__(self) -> Iterator[Teacher]:
        return iter(list(self._teachers.values()))

    @property
    def loading(self) -> bool:
        """Whether a model is being read on a thread, which cannot be interrupted."""
        return self._loader.busy

    def get(self, name: str) -> Teacher:
        """The teacher called `name`.

        Raises:
            TeacherNotFoundError: if there is none; the message names those that exist.
        """
        teacher = self._teachers.get(name)
        if teacher is None:
            known = ", ".join(sorted(self._teachers)) or "none"
            raise TeacherNotFoundError(f"teacher {name[:128]!r} is not served here; served: {known}.")
        return teacher

    async def load(self, name: str, model: str) -> Teacher:
        """Load a teacher and test it. The others keep scoring, and may be put to sleep and woken meanwhile.

        Raises:
            InvalidRequestError: if the name is taken.
            ConfigError: if the model cannot be loaded or is larger than the memory budget.
            OverloadedError: if busy teachers hold the memory.
            DeadlineError: if it takes longer than `load_seconds`.
            UnavailableError: if it fails its self-test, or another model takes too long to be read.
        """
        if name in self._teachers:
            raise InvalidRequestError(f"teacher {name!r} is served already; unload it first or take another name.")
        # Listed before it is loaded: that takes the name, and lets health and GetLoad show that it is loading.
        teacher = self._teachers[name] = Teacher(name, model, self._limits)
        teacher.idle.set()
        await self._set_state(teacher, pb.TEACHER_STATE_LOADING)
        try:
            async with teacher.changing:
                await self._starter.start(teacher)
        except BaseException:
            self._teachers.pop(name, None)  # with a default, because the server may have been closed meanwhile
            await self._set_state(teacher, pb.TEACHER_STATE_UNSPECIFIED)
            raise
        return teacher

    async def unload(self, name: str, grace: float) -> None:
        """Refuse new calls, wait up to `grace` seconds for those in flight, then free the teacher.

        If the caller is cancelled while it waits, the unload is taken back and the teacher is as before, unless another
        caller waits too. Once the engine is being freed, this cannot be undone.

        Raises:
            TeacherNotFoundError: if there is no teacher of that name.
        """
        teacher = self.get(name)
        if not teacher.unloads:
            teacher.drained_from = teacher.state
        teacher.unloads += 1
        try:
            await self._set_state(teacher, pb.TEACHER_STATE_DRAINING)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await teacher.idle.wait()
            async with teacher.changing:
                if self._teachers.get(name) is teacher:  # otherwise another call has unloaded it
                    await run_to_completion(self._free(teacher))
        finally:
            teacher.unloads -= 1
            if self._teachers.get(name) is teacher and not teacher.unloads:
                await self._undrain(teacher)

    async def _free(self, teacher: Teacher) -> None:
        worker, teacher.worker = teacher.worker, None
        if worker is not None:
            await asyncio.to_thread(worker.close)
        self._teachers.pop(teacher.name, None)
        await self._set_state(teacher, pb.TEACHER_STATE_UNSPECIFIED)

    async def _undrain(self, teacher: Teacher) -> None:
        """Restore the state before an unload that was taken back; a teacher that was loading may be loaded by now."""
        if teacher.state != pb.TEACHER_STATE_DRAINING:  # it died meanwhile
            return
        loaded = teacher.drained_from == pb.TEACHER_STATE_LOADING and teacher.worker is not None
        await self._set_state(teacher, pb.TEACHER_STATE_READY if loaded else teacher.drained_from)

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Teacher]:
        """Hold a teacher awake during a call, waking it first if it sleeps.

        Raises:
            TeacherNotFoundError: if there is no teacher of that name.
            UnavailableError: if it is loading, draining or failed, or cannot be woken.
            OverloadedError: if it sleeps and busy teachers hold the memory.
        """
        teacher = self.get(name)
        teacher.enter()  # before any await, because a teacher with a call in flight is not put to sleep
        try:
            if teacher.state == pb.TEACHER_STATE_ASLEEP:
                async with teacher.changing:
                    if teacher.state == pb.TEACHER_STATE_ASLEEP:  # checked again: another request may have woken it
                        await self._memory.wake(teacher)
            teacher.require_ready()
            yield teacher
        finally:
            teacher.leave()

    async def sleep(self, name: str) -> None:
        """Move a teacher's weights off the device; the next request wakes it.

        Raises:
            TeacherNotFoundError: if there is no teacher of that name.
            UnavailableError: if it is not ready.
            OverloadedError: if calls are in flight.
        """
        teacher = self.get(name)
        async with teacher.changing:
            await self._memory.put_to_sleep(teacher)

    async def wake(self, name: str) -> None:
        """Wake a sleeping teacher now rather than at its next request."""
        async with self.use(name):
            pass

    async def update_weights(self, name: str, folder: Path, expected: str = "") -> str:
        """Replace a teacher's weights between two batches, all or nothing; returns the new weights hash.

        The folder is read while the teacher keeps scoring. The new weights are tested before any request is scored with
        them; if they fail, the old ones are restored and tested as well.

        Args:
            name: name of the teacher.
            folder: folder with the new weights.
            expected: hash that the weights to be replaced must have; "" for any.

        Raises:
            ConfigError, IncompatibleTeacherError: if the folder does not fit, or the weights in use are not the
                expected ones; those in use stay.
            NonFiniteError, IncompatibleTeacherError: if the new weights fail the self-test; the old ones are restored.
            UnavailableError: if the old weights cannot be restored; the teacher has then failed.
        """
        # `use` keeps the teacher awake, and `unload` waits for it; the loader's turn orders concurrent updates.
        async with self.use(name) as teacher, self._loader.turn() as turn:
            if expected not in ("", teacher.info.weights_hash):
                raise IncompatibleTeacherError(
                    f"teacher {teacher.name!r} has weights {teacher.info.weights_hash}, not {expected[:128]}."
                )
            engine = teacher.running().engine
            exchange = await turn.read(f"the folder {folder}", lambda: prepare(engine, folder))
            await run_to_completion(self._swap(teacher, exchange, folder))
            return teacher.info.weights_hash

    async def _swap(self, teacher: Teacher, exchange: Exchange, folder: Path) -> None:
        def on_worker(engine: Engine) -> None:
            swap(engine, exchange, folder, lambda: self._starter.test(engine, teacher.name))

        before = teacher.info.weights_hash
        try:
            await asyncio.wrap_future(teacher.running().call(on_worker))
        except LostWeightsError as error:
            await self._lose(teacher, error)
            raise UnavailableError(f"teacher {teacher.name!r} has failed: {error}") from error
        except Exception as error:
            _log.warning("weights refused", extra={"teacher": teacher.name, "weights_hash": before, "reason": error})
            raise
        teacher.replaced = (folder, teacher.info.weights_hash)
        await self._on_state(teacher)
        _log.info("weights replaced", extra={"teacher": teacher.name, "weights_hash": teacher.info.weights_hash})

    async def _lose(self, teacher: Teacher, error: LostWeightsError) -> None:
        teacher.reason = str(error)
        await self._set_state(teacher, pb.TEACHER_STATE_FAILED)
        _log.error("weights lost", extra={"teacher": teacher.name, "reason": error})

    async def close(self) -> None:
        """Close the engines of all teachers and forget them."""
        self.closing = True
        for task in list(self._restarts):
            task.cancel()
        for teacher in self:
            if teacher.worker is not None:
                await asyncio.to_thread(teacher.worker.close)
        self._teachers.clear()

    def watch(self) -> None:
        """Look for engines that hang; to be called about once a second."""
        for teacher in self:
            worker = teacher.worker
            if worker is not None and not worker.dead and worker.stalled(self._settings.stall_seconds):
                # A thread that hangs cannot be ended; only a new process helps.
                self._on_fatal(
                    f"teacher {teacher.name!r} has been stuck in one batch for {self._settings.stall_seconds:.0f} s"
                )

    def _dead(self, teacher: Teacher, reason: str) -> None:
        if self.closing or teacher.worker is None:  # the worker is being closed anyway
            return
        worker, teacher.worker, teacher.reason = teacher.worker, None, reason
        task = asyncio.get_running_loop().create_task(self._after_death(teacher, worker))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _after_death(self, teacher: Teacher, worker: EngineWorker) -> None:
        await self._set_state(teacher, pb.TEACHER_STATE_FAILED)
        _log.error("engine is dead", extra={"teacher": teacher.name, "reason": teacher.reason})
        if self._settings.on_failure == "exit" or teacher.restarts >= self._settings.max_restarts:
            self._on_fatal(f"the engine of teacher {teacher.name!r} is dead: {teacher.reason}")
            return
        teacher.restarts += 1
        self._on_restart(teacher.name)
        await self._set_state(teacher, pb.TEACHER_STATE_LOADING)
        try:
            # The dead engine frees its memory first: few devices can hold a model twice.
            await asyncio.to_thread(worker.close)
            async with teacher.changing:
                if self._teachers.get(teacher.name) is teacher:
                    await self._starter.start(teacher)
            teacher.reason = ""
        except LostWeightsError as error:
            # The model's own weights could be loaded, but clients expect those that replaced them, so refuse instead.
            await self._lose(teacher, error)
        except Exception as error:
            self._on_fatal(f"teacher {teacher.name!r} could not be restarted: {error}")

    async def _set_state(self, teacher: Teacher, state: int) -> None:
        teacher.state = state
        await self._on_state(teacher)
