"""Bringing a teacher up: room in the memory budget, the model read and tested, and a worker that runs it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from opd.adapters import split_adapter
from opd.errors import ConfigError, OpdError, OverloadedError, UnavailableError
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.device import DeviceTurn
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import Engine
from teacher_server.observe.logs import describe_error
from teacher_server.residency.loader import Loader
from teacher_server.residency.memory_budget import MemoryBudget
from teacher_server.residency.model_folder import check_plausible, local_folder, weight_bytes
from teacher_server.residency.teacher import Teacher, self_test
from teacher_server.residency.weights import put_back
from teacher_server.settings import LimitSettings, TeacherEngineSettings

_log = logging.getLogger(__name__)

EngineFactory = Callable[[str], Engine]
"""Builds the engine for a model path or hub id. It is slow, and called on a thread."""


class Starter:
    """Brings the teachers of a server up, at first and after the death of an engine.

    Args:
        factory: builds engines.
        limits: limits on batches.
        settings: whether engines are tested before they answer.
        loader: gives out turns for reading models.
        memory: where each teacher reserves its bytes.
        set_state: changes a teacher's state and updates health and metrics.
        on_batch: called on a worker's thread after each batch, with teacher, sequences, tokens and seconds.
        on_dead: called on the event loop with the teacher and the reason when an engine has died.
    """

    def __init__(
        self,
        factory: EngineFactory,
        limits: LimitSettings,
        settings: TeacherEngineSettings,
        *,
        loader: Loader,
        memory: MemoryBudget,
        set_state: Callable[[Teacher, int], Awaitable[None]],
        on_batch: Callable[[str, int, int, float], None],
        on_dead: Callable[[Teacher, str], None],
    ) -> None:
        self._factory = factory
        self._limits = limits
        self._settings = settings
        self._loader = loader
        self._memory = memory
        self._set_state = set_state
        self._on_batch = on_batch
        self._on_dead = on_dead
        self._turn = DeviceTurn()

    async def start(self, teacher: Teacher) -> None:
        """Load a teacher's engine and make it ready, or asleep if the budget has no room for what it really takes.

        Raises:
            ConfigError: if the model cannot be loaded or is larger than the memory budget.
            OverloadedError: if busy teachers hold the memory.
            DeadlineError: if it takes longer than `load_seconds`.
            UnavailableError: if it fails its self-test, or another model takes too long to be read.
            LostWeightsError: if the weights that replaced the model's own cannot be put back.
        """
        loop = asyncio.get_running_loop()
        async with self._loader.turn() as turn:
            needed = await asyncio.to_thread(_examine, teacher.model)
            await self._memory.reserve(teacher, needed)
            try:
                engine = await turn.read(f"model {teacher.model}", lambda: self._build(teacher), lambda e: e.close())
            # A load that fails or is cancelled must release its memory, or no other teacher could ever have it.
            except BaseException:
                teacher.held_bytes = 0
                raise
        teacher.worker = EngineWorker(
            teacher.name,
            engine,
            self._turn,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_batch_sequences=self._limits.max_batch_sequences,
            # Only the event loop may change the state of calls and teachers.
            post=lambda function: _call_if_open(loop, function),
            on_dead=lambda reason: self._on_dead(teacher, reason),
            on_batch=lambda n, tokens, seconds: self._on_batch(teacher.name, n, tokens, seconds),
        )
        teacher.last_used = time.monotonic()
        teacher.weight_bytes = engine.memory_bytes() or needed
        try:
            await self._settle(teacher)
        except BaseException:
            worker, teacher.worker = teacher.worker, None
            await asyncio.to_thread(worker.close)
            raise
        _log.info("teacher ready", extra={"teacher": teacher.name, "weights_hash": engine.info.weights_hash})

    def test(self, engine: Engine, name: str) -> None:
        """The self-test of an engine, if the settings ask for it; see `teacher_server.residency.teacher.self_test`."""
        if self._settings.self_test:
            self_test(engine, name)

    def _build(self, teacher: Teacher) -> Engine:
        try:
            engine = self._factory(teacher.model)
        except OpdError:
            raise
        except Exception as error:
            raise UnavailableError(f"teacher {teacher.name!r} cannot be loaded: {describe_error(error)}") from error
        try:
            with self._turn:
                if teacher.replaced is not None:
                    put_back(engine, *teacher.replaced)
                self.test(engine, teacher.name)
        except BaseException:
            engine.close()
            raise
        return engine

    async def _settle(self, teacher: Teacher) -> None:
        """Reserve the bytes that a loaded teacher really takes; if the budget has no room, it starts asleep."""
        if self._memory.budget and not teacher.weight_bytes:
            raise ConfigError(
                f"the memory that teacher {teacher.name!r} takes is not known, so memory_budget_bytes cannot be kept; "
                "give a model folder with safetensors, or set no budget."
            )
        try:
            await self._memory.reserve(teacher, teacher.weight_bytes)
        except OverloadedError:
            await self._memory.begin_asleep(teacher)
        if teacher.state == pb.TEACHER_STATE_LOADING:
            await self._set_state(teacher, pb.TEACHER_STATE_READY)


def _examine(model: str) -> int:
    """Bytes of a model's weights, before it is loaded; 0 if unknown.

    Raises:
        ConfigError: if the model's files cannot match its config.
    """
    folder = local_folder(split_adapter(model)[0])
    if folder is None:
        return 0
    check_plausible(folder)
    return weight_bytes(folder)


def _call_if_open(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended, and no call is waiting
        loop.call_soon_threadsafe(function)
