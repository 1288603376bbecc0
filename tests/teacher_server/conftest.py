"""A real server on a real socket around a small numpy teacher, so that the service's tests need no torch."""

import asyncio
import importlib.util
import io
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from faults import FaultyServer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import PATIENCE, until, wait_until

from opd.telemetry.logs import JsonLines
from opd.wire.bounds import RequestBounds
from opd.wire.channel import ClientSecurity, open_channel
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import admin_pb2_grpc, teacher_pb2_grpc
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.engines.base import EngineItem
from teacher_server.settings import ServerSettings


def _load_engine_class() -> Any:
    """The numpy teacher lives in a module of its own, because server processes import it too."""
    spec = importlib.util.spec_from_file_location("numpy_teacher", Path(__file__).with_name("numpy_teacher.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NumpyEngine


NumpyEngine: Any = _load_engine_class()
VOCAB = NumpyEngine.VOCAB
PROGRAMS = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("teacher_server", "support"))
"""Where the programs and engines of server processes lie."""


def expected(engine: Any, item: ScoreItem, spec: PayloadSpec, temperature: float = 1.0) -> Scores:
    """What the engine says without any server."""
    return engine._one(EngineItem(item, spec, temperature))


@dataclass
class Client:
    """A thin client of one running server."""

    server: FaultyServer
    engines: dict[str, Any]
    channel: grpc.aio.Channel
    stub: Any
    security: ClientSecurity = field(default_factory=ClientSecurity)
    ids: Any = field(default_factory=itertools.count)

    @property
    def address(self) -> str:
        return f"{self.server.settings.host}:{self.server.port}"

    async def info(self, teacher: str = "t") -> pb.TeacherInfo:
        answer = await self.stub.Describe(pb.DescribeRequest(teacher=teacher), metadata=self.security.metadata())
        return answer.teachers[0]

    async def health(self, service: str = "") -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    async def score(
        self, items: list[ScoreItem], spec: PayloadSpec, *, teacher: str = "t", timeout: float = 60.0, **options: Any
    ) -> list[Scores]:
        bounds = RequestBounds.from_info(await self.info(teacher))
        request_id = f"r{next(self.ids)}"
        asked = {"accept_batches": True} | options  # as the fleet asks
        message = build_score_request(items, spec, teacher=teacher, request_id=request_id, **asked)
        decoder = ScoreStreamDecoder(
            items,
            spec,
            bounds,
            request_id=request_id,
        )
        async for response in self.stub.Score(message, timeout=timeout, metadata=self.security.metadata()):
            decoder.feed(response)
        return decoder.finish()

    async def settled(self, seconds: float = PATIENCE) -> None:
        """Wait until nothing is in flight, then check that all was released, exactly once."""
        budget = self.server.shared.budget

        def idle() -> bool:
            done = budget.opened == budget.closed and self.server.shared.metrics.calls._value.get() == 0
            return done and all(t.in_flight == 0 for t in self.server.shared.teachers)

        await until(idle, seconds)
        assert budget.opened == budget.closed
        assert (budget.used.tokens, budget.used.reply_bytes) == (0, 0)
        assert budget._held == {}
        for teacher in self.server.shared.teachers:
            assert teacher.in_flight == 0
            if teacher.worker is not None:
                assert teacher.worker.load()[:2] == (0, 0)
        assert self.server.shared.metrics.unexpected_errors._value.get() == 0


def make_items(count: int = 3, prompt: int = 4, rows: int = 6, seed: int = 0, k: int = 0) -> list[ScoreItem]:
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        gather = np.argsort(rng.random((rows, VOCAB)), axis=1)[:, :k].astype(np.uint32) if k else None
        items.append(ScoreItem(rng.integers(0, VOCAB, prompt + rows).astype(np.uint32), prompt, gather))
    return items


@pytest.fixture
def items() -> Callable[..., list[ScoreItem]]:
    return make_items


@pytest.fixture
def reference() -> Callable[..., Scores]:
    return expected


@pytest.fixture(scope="session")
def numpy_engine() -> Any:
    return NumpyEngine


@pytest.fixture
def weights() -> Callable[[Path, int], Path]:
    """`weights(folder, seed)` writes weights for the numpy teacher."""

    def write(folder: Path, seed: int) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "seed").write_text(str(seed))
        return folder

    return write


@pytest.fixture
def log_text() -> Iterator[Callable[[], str]]:
    """`log_text()` is what the server has logged so far, as it would be written."""
    stream, logger = io.StringIO(), logging.getLogger("teacher_server")
    handler, before = logging.StreamHandler(stream), logger.level
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield stream.getvalue
    logger.removeHandler(handler)
    logger.setLevel(before)


Start = Callable[..., Awaitable[Client]]


@pytest.fixture
def cancel_midway() -> Callable[[asyncio.Task[Any], threading.Event, threading.Event], Awaitable[None]]:
    """`await cancel_midway(call, inside, go_on)` cancels a call while a thread is inside its work, then lets that end.

    The call must end as cancelled.
    """

    async def cancel(call: asyncio.Task[Any], inside: threading.Event, go_on: threading.Event) -> None:
        await asyncio.to_thread(inside.wait, 120)
        call.cancel()
        for _ in range(10):  # turns of the loop in which the cancellation gets as far as it can
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await call

    return cancel


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(**settings)` runs a server with teacher "t"; all are closed at the end."""
    clients: list[Client] = []

    async def run(
        teachers: dict[str, str] | None = None,
        *,
        security: ClientSecurity | None = None,
        make: Callable[[str], Any] | None = None,
        fault: str = "",
        **settings: Any,
    ) -> Client:
        settings.setdefault("metrics_port", -1)
        settings.setdefault("settle_seconds", 0.0)
        if "security_" in settings:
            settings["security"] = settings.pop("security_")
        limits = {"max_k": VOCAB, "allow_full": True, **settings.pop("limits", {})}
        engines: dict[str, Any] = {}

        def factory(model: str) -> Any:
            engines[model] = (make or NumpyEngine)(model)
            return engines[model]

        server = FaultyServer(ServerSettings(limits=limits, **settings), factory, fault)
        await server.start({"t": "numpy"} if teachers is None else teachers)
        security = security or ClientSecurity()
        channel = open_channel(f"127.0.0.1:{server.port}", security)
        client = Client(server, engines, channel, teacher_pb2_grpc.TeacherServiceStub(channel), security)
        clients.append(client)
        return client

    yield run
    for client in clients:
        await client.channel.close()
        await client.server.close()


@pytest.fixture
def operator(start: Start) -> Callable[..., Awaitable[tuple[Client, Any, Any]]]:
    """`await operator(folder, **settings)` runs a server with an operator's token: client, admin stub, metadata."""

    async def run(tmp_path: Path, **settings: Any) -> tuple[Client, Any, Any]:
        tokens, secret = tmp_path / "tokens.yaml", tmp_path / "secret"
        tokens.write_text("- {name: op, token: operator-secret-1, scopes: [score, admin]}\n")
        secret.write_text("operator-secret-1")
        client = await start(security=ClientSecurity(token_file=secret), security_={"tokens": tokens}, **settings)
        return client, admin_pb2_grpc.AdminServiceStub(client.channel), client.security.metadata()

    return run


@dataclass
class Process:
    """A server process around the numpy teacher."""

    popen: forked.Program
    address: str
    metrics_port: int
    log: Path
    http_port: int = 0

    def lines(self) -> str:
        return self.log.read_text()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`launch(*flags)` runs `python -m teacher_server` with teacher "t"; all processes are ended at the end."""
    running: list[forked.Program] = []

    def run(*flags: str, wait: bool = True, model: str = "t=numpy", env: dict[str, str] | None = None) -> Process:
        number = len(running)
        port_file, log = tmp_path / f"port{number}", tmp_path / f"log{number}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PROGRAMS, **(env or {})}
        program = "faulty_server" if "--fault" in flags else "teacher_server"
        command = [sys.executable, "-m", program, "--engine", "numpy_teacher:NumpyEngine"]
        command += ["--model", model, "--port-file", str(port_file), *flags]
        popen = forked.Program(command, env=environment, log=log, cwd=Path(__file__).parents[2])
        running.append(popen)
        if wait:
            wait_until(lambda: port_file.exists() or popen.poll() is not None, why=log.read_text)
            assert popen.poll() is None, log.read_text()
        address, metrics_port, _, *door = port_file.read_text().split() if wait else ("", "0", "")
        return Process(popen, address, int(metrics_port), log, int(door[0]) if door else 0)

    yield run
    for popen in running:
        if popen.poll() is None:
            popen.send_signal(signal.SIGKILL)
        popen.wait(120)
