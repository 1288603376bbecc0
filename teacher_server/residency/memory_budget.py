"""The memory budget, and how much of it each teacher holds. Idle teachers are put to sleep to make room for others."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from opd.errors import ConfigError, OverloadedError, UnavailableError
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.engines.base import Engine
from teacher_server.observe.logs import describe_error
from teacher_server.residency.loader import run_to_completion
from teacher_server.residency.teacher import Teacher


class MemoryBudget:
    """The memory budget of a server.

    Its lock is held while teachers are put to sleep, but not while one is loaded or woken, which may take minutes;
    those hold a reservation of bytes instead.

    Args:
        budget: bytes of weights that may be awake at once; 0 for no limit.
        teachers: returns the server's current teachers.
        set_state: changes a teacher's state and updates health and metrics.
    """

    def __init__(
        self,
        budget: int,
        teachers: Callable[[], Iterable[Teacher]],
        set_state: Callable[[Teacher, int], Awaitable[None]],
    ) -> None:
        self.budget = budget
        self._teachers = teachers
        self._set_state = set_state
        self._lock = asyncio.Lock()

    async def reserve(self, teacher: Teacher, needed: int) -> None:
        """Reserve `needed` bytes for a teacher, putting idle teachers to sleep if necessary, least recently used first.

        Raises:
            ConfigError: if the budget is smaller than `needed`.
            OverloadedError: if busy teachers hold the memory.
        """
        if self.budget and needed > self.budget:
            raise ConfigError(
                f"teacher {teacher.name!r} needs {needed} bytes, but engine.memory_budget_bytes is {self.budget}; "
                "raise it or serve a smaller model."
            )
        async with self._lock:
            # Checked again after each: while one falls asleep, requests may wake another, or a load may fail.
            while self.budget and self._held_by_others(teacher) + needed > self.budget:
                others = (t for t in self._teachers() if t is not teacher)
                idle = [t for t in others if t.state == pb.TEACHER_STATE_READY and not t.in_flight]
                if not idle:
                    raise OverloadedError(
                        f"teacher {teacher.name!r} has no room in engine.memory_budget_bytes, because all other "
                        "teachers are in use; retry later.",
                        1.0,
                    )
                await self._put_to_sleep(min(idle, key=lambda t: t.last_used))
            teacher.held_bytes = needed

    async def put_to_sleep(self, teacher: Teacher) -> None:
        """Move a teacher's weights off the device, unless it sleeps already.

        Raises:
            UnavailableError: if it is not ready, or its engine fails.
            OverloadedError: if calls are in flight.
        """
        async with self._lock:
            if teacher.state == pb.TEACHER_STATE_ASLEEP:
                return
            teacher.require_ready()
            if teacher.in_flight:
                raise OverloadedError(
                    f"teacher {teacher.name!r} has {teacher.in_flight} calls in flight; retry later.", 1.0
                )
            await self._put_to_sleep(teacher)

    async def begin_asleep(self, teacher: Teacher) -> None:
        """Put a teacher to sleep that was just loaded.

        Calls in flight were left by its previous engine, and do not need this one awake.

        Raises:
            UnavailableError: if its engine fails.
        """
        async with self._lock:
            await self._put_to_sleep(teacher)

    async def wake(self, teacher: Teacher) -> None:
        """Move a sleeping teacher's weights back to the device.

        Raises:
            OverloadedError: if busy teachers hold the memory.
            UnavailableError: if its engine fails.
        """
        # Reserved outside `_wake`, because waking may take minutes and must not hold the lock meanwhile.
        await self.reserve(teacher, teacher.weight_bytes)
        await run_to_completion(self._wake(teacher))

    def _held_by_others(self, teacher: Teacher) -> int:
        return sum(t.held_bytes for t in self._teachers() if t is not teacher)

    async def _wake(self, teacher: Teacher) -> None:
        try:
            await _call(teacher, lambda engine: engine.wake())
        except Exception as error:
            teacher.held_bytes = 0
            raise UnavailableError(f"teacher {teacher.name!r} cannot be woken: {describe_error(error)}") from error
        if teacher.state == pb.TEACHER_STATE_ASLEEP:
            await self._set_state(teacher, pb.TEACHER_STATE_READY)

    async def _put_to_sleep(self, teacher: Teacher) -> None:
        before = teacher.state
        # The state changes first, so that a request that arrives meanwhile waits for the lock and wakes the teacher
        # again.
        await self._set_state(teacher, pb.TEACHER_STATE_ASLEEP)

        async def fall_asleep() -> None:
            try:
                await _call(teacher, lambda engine: engine.sleep())
            except Exception as error:
                # Otherwise it is being unloaded, or its engine has died of something else.
                if teacher.worker is not None and teacher.state == pb.TEACHER_STATE_ASLEEP:
                    await self._set_state(teacher, before)
                raise UnavailableError(
                    f"teacher {teacher.name!r} cannot be put to sleep: {describe_error(error)}"
                ) from error
            teacher.held_bytes = 0

        await run_to_completion(fall_asleep())


async def _call(teacher: Teacher, function: Callable[[Engine], None]) -> None:
    await asyncio.wrap_future(teacher.running().call(function))
