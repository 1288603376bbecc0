"""A fleet of simulated servers under the real client code, in virtual time: for benchmarks, tests and planning.

`VirtualTimeLoop` is an asyncio loop whose clock jumps to the next timer instead of waiting, so an hour of fleet takes
seconds and every run of the same seed is the same. `SimulatedFleet` puts `SimulatedServer`s behind the fleet's
`ReplicaLink`, so that scheduler, hedging, health and re-issue are the ones that run in production.
"""

import asyncio
import selectors
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from opd.errors import DeadlineError, OpdError, TeacherNotFoundError, UnavailableError
from opd.fleet.core import FleetCore
from opd.fleet.membership.discovery import Source
from opd.fleet.membership.link import Description, ReplicaLink, ReplicaRequest
from opd.fleet.settings import FleetSettings, HealthSettings
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Never waits: hands the wanted timeout to the clock."""

    elapsed = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("the simulation waits for an event that never comes")
        self.elapsed += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time; `time()` starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.elapsed


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


@dataclass(eq=False)
class SimulatedServer:
    """A server that works off tokens at a fixed speed, one row after the other.

    Attributes:
        address: its name.
        teachers: what it serves, name to weights hash.
        tokens_per_second: its speed; may be changed while it works.
        row_seconds: fixed cost of a row.
        network_seconds: one way.
        up, frozen: whether it can be reached, whether it answers at all; may be changed at any time.
        instance: counts restarts.
        rows: how many it scored.
    """

    address: str
    teachers: Mapping[str, str]
    tokens_per_second: float
    row_seconds: float = 0.0
    network_seconds: float = 0.0005
    up: bool = True
    frozen: bool = False
    instance: int = 1
    rows: int = 0
    _queue: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)
    _worker: asyncio.Task[None] | None = None

    def work(self, tokens: int) -> asyncio.Future[None]:
        """Queue a row; the future is done when it is scored, and may be cancelled."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._queue.append((tokens, future))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._run())
        return future

    def crash(self) -> None:
        """Stop being reachable; what runs fails."""
        self.up = False
        for _, future in self._queue:
            if not future.done():
                future.set_exception(UnavailableError(f"replica {self.address} went away."))

    def restart(self) -> None:
        """Be reachable again, as another process."""
        self.up, self.frozen, self.instance = True, False, self.instance + 1

    async def _run(self) -> None:
        while self._queue:
            tokens, future = self._queue[0]
            if not future.done():
                seconds = self.row_seconds + tokens / self.tokens_per_second
                await asyncio.wait([future], timeout=seconds)
                if not future.done():
                    while self.frozen:
                        await asyncio.sleep(0.1)
                    self.rows += 1
                    if not future.done():
                        future.set_result(None)
            self._queue.popleft()


class SimulatedLink(ReplicaLink):
    """A `ReplicaLink` to a simulated server."""

    def __init__(self, server: SimulatedServer) -> None:
        self.address = server.address
        self._server = server

    async def describe(self, timeout: float) -> Description:
        await self._travel(timeout)
        infos = {name: _info(name, weights) for name, weights in self._server.teachers.items()}
        return Description(infos, str(self._server.instance), "simulated")

    async def load(self, timeout: float) -> pb.GetLoadResponse:
        await self._travel(timeout)
        loads = [pb.TeacherLoad(teacher=name, state=pb.TEACHER_STATE_READY) for name in self._server.teachers]
        return pb.GetLoadResponse(instance_id=str(self._server.instance), teachers=loads)

    async def score(
        self, request: ReplicaRequest, timeout: float | None, idle: float
    ) -> AsyncGenerator[tuple[int, Scores], None]:
        """See `ReplicaLink.score`; all tokens of a row have one score, a function of row and weights."""
        await self._travel(idle)
        weights = self._server.teachers.get(request.info.name)
        if weights is None:
            raise TeacherNotFoundError(f"replica {self.address} does not serve teacher {request.info.name!r}.")
        futures = [self._server.work(0 if request.check else len(item.token_ids)) for item in request.items]
        try:
            for index, (item, future) in enumerate(zip(request.items, futures, strict=True)):
                if not (await asyncio.wait([future], timeout=idle))[0]:
                    raise DeadlineError(f"replica {self.address} sent nothing for {idle:.3g} s.")
                await future
                await asyncio.sleep(self._server.network_seconds)
                value = -zlib.crc32(item.token_ids.tobytes(), zlib.crc32(weights.encode())) / 2.0**26
                yield index, Scores(sampled=np.full(item.response_length, value, np.float32), weights_hash=weights)
        finally:
            for future in futures:
                future.cancel()

    async def head(self, teacher: str, expected_hash: str, timeout: float) -> Head:
        """Simulated teachers have no head."""
        raise TeacherNotFoundError(f"simulated teacher {teacher!r} does not serve its head.")

    async def tokens(self, teacher: str, start: int, timeout: float) -> Sequence[bytes]:
        """Simulated teachers have no tokenizer."""
        return ()

    async def tokenizer(self, teacher: str, fingerprint: str, timeout: float) -> bytes:
        """Simulated teachers have no tokenizer."""
        return b""

    async def update_weights(self, teacher: str, folder: str, timeout: float) -> str:
        """See `ReplicaLink.update_weights`; a simulated folder is the hash of its weights."""
        await self._travel(timeout)
        self._server.teachers = {**self._server.teachers, teacher: folder}
        return folder

    async def reconnect(self) -> None:
        """Nothing to forget."""

    async def close(self) -> None:
        """Nothing to free."""

    async def _travel(self, timeout: float) -> None:
        waited = 0.0
        while self._server.frozen and self._server.up:
            await asyncio.sleep(0.05)
            waited += 0.05
            if waited >= timeout:
                raise UnavailableError(f"replica {self.address} did not answer in {timeout:.3g} s.")
        if not self._server.up:
            raise UnavailableError(f"replica {self.address} cannot be reached.")
        await asyncio.sleep(2 * self._server.network_seconds)


class SimulatedFleet:
    """A link factory over simulated servers, by address."""

    def __init__(self, servers: Sequence[SimulatedServer]) -> None:
        self.servers = {server.address: server for server in servers}

    def link(self, address: str) -> SimulatedLink:
        """The connection to an address."""
        return SimulatedLink(self.servers[address])


async def score_batch(
    core: FleetCore, rows: Sequence[tuple[str, int]], groups: Sequence[str] | None = None
) -> tuple[float, list[Scores | OpdError]]:
    """Submit rows at once and wait for all.

    Args:
        core: connected to simulated servers, on the running loop.
        rows: (teacher, tokens) of each.
        groups: as in `TeacherFleet.submit_many`.

    Returns:
        Virtual seconds from submission to the last delivery, and what each row got.
    """
    start, done = core.now(), asyncio.Event()
    outcomes: dict[int, list[Scores | OpdError]] = {index: [] for index in range(len(rows))}
    left = len(rows)

    def deliver_to(index: int) -> Callable[[Scores | OpdError], None]:
        def deliver(outcome: Scores | OpdError) -> None:
            nonlocal left
            outcomes[index].append(outcome)
            left -= 1
            if left == 0:
                done.set()

        return deliver

    core.dispatcher.submit(
        core.make_task(
            teacher,
            ScoreItem(np.zeros(tokens, np.uint32), 1),
            PayloadSpec.sampled(),
            1.0,
            groups[index] if groups is not None else "",
            None,
            deliver_to(index),
        )
        for index, (teacher, tokens) in enumerate(rows)
    )
    if rows:
        await done.wait()
    for index, got in outcomes.items():
        if len(got) != 1:
            raise RuntimeError(f"row {index} was delivered {len(got)} times")
    return core.now() - start, [got[0] for got in outcomes.values()]


async def connect_simulated(servers: Sequence[SimulatedServer], settings: FleetSettings | None = None) -> FleetCore:
    """The real client core, connected to simulated servers; by default a function of the servers and rows alone."""
    fleet = SimulatedFleet(servers)
    settings = settings or FleetSettings(health=HealthSettings(check_seed=0))
    core = FleetCore([Source(server.address) for server in servers], fleet.link, settings, "sim")
    await core.connect()
    return core


def _info(name: str, weights: str) -> pb.TeacherInfo:
    return pb.TeacherInfo(
        name=name,
        engine="simulated",
        weights_hash=weights,
        compute_dtype=pb.DTYPE_F32,
        vocab_size=1000,
        tokenizer=pb.TokenizerInfo(fingerprint="simulated", size=1000),
        payloads=[pb.PAYLOAD_KIND_SAMPLED],
        limits=pb.Limits(max_sequence_tokens=1 << 20, max_sequences=64, max_request_tokens=1 << 20),
        deterministic=True,
        state=pb.TEACHER_STATE_READY,
    )


def draw_rows(count: int, seed: int) -> list[int]:
    """Lengths of rows in tokens, log-normal around 800."""
    rng = np.random.default_rng(seed)
    return [int(n) for n in np.clip(rng.lognormal(np.log(800), 0.6, count), 16, 16_000)]
