"""A real server on a real socket around a small numpy teacher, so that the service's tests need no torch."""

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from opd.wire.bounds import RequestBounds
from opd.wire.channel import ClientSecurity, open_channel
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.fingerprint import head_hash
from opd.wire.request import build_score_request
from opd.wire.tensors import bf16_bits
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from teacher_server.engines.base import EngineInfo, EngineItem, HeadIdentity, TokenizerIdentity
from teacher_server.server import TeacherServer
from teacher_server.settings import ServerSettings

VOCAB = 97
HIDDEN = 8


class NumpyEngine:
    """A bigram softmax teacher: the next token depends on the present one; exact, deterministic, quick.

    `seconds_per_batch` and the `before_score` hook let tests slow it down or break it.
    """

    def __init__(self, model: str = "numpy", *, vocab: int = VOCAB, hidden: int = HIDDEN, seed: int = 0) -> None:
        self.model = model
        self.vocab, self.hidden = vocab, hidden
        self.seconds_per_batch = 0.0
        self.before_score: Callable[[Sequence[EngineItem]], None] = lambda batch: None
        self.batches: list[int] = []
        self.asleep = self.closed = False
        self.threads: set[int] = set()
        self._weights(seed)

    def _weights(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._embed = rng.normal(size=(self.vocab, self.hidden)).astype(np.float32)
        self._head = rng.normal(size=(self.vocab, self.hidden)).astype(np.float32)
        made = Head(self._head, None, "f32", 1.0, 0.0, "")
        self._head_identity = HeadIdentity(head_hash(made), self.hidden, 1.0, 0.0, "f32", has_bias=False)
        self._hash = hashlib.sha256(self._embed.tobytes() + self._head.tobytes()).hexdigest()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="numpy 1",
            model=self.model,
            weights_hash=self._hash,
            compute_dtype="f32",
            vocab_size=self.vocab,
            tokenizer=TokenizerIdentity("f" * 64, "", self.vocab),
            head=self._head_identity,
            payloads=frozenset(PayloadKind),
            supports_temperature=True,
            max_sequence_tokens=100_000,
            max_k=self.vocab,
            deterministic=True,
        )

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        assert not self.asleep and not self.closed
        self.threads.add(threading.get_ident())
        self.batches.append(len(batch))
        self.before_score(batch)
        if self.seconds_per_batch:
            time.sleep(self.seconds_per_batch)
        return [None if entry.cancelled() else self._one(entry) for entry in batch]

    def _one(self, entry: EngineItem) -> Scores:
        item, spec = entry.item, entry.spec
        hidden = self._embed[item.token_ids[item.prompt_length - 1 : -1]]
        if spec.kind is PayloadKind.HIDDEN:
            return Scores(hidden=hidden if spec.value_dtype == "f32" else bf16_bits(hidden))
        logits = hidden @ self._head.T / np.float32(entry.temperature)
        if spec.kind is PayloadKind.FULL:
            return Scores(logits=logits)
        top = logits.max(axis=1, keepdims=True)
        log_probs = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        rows = np.arange(len(hidden))
        sampled = log_probs[rows, item.response_ids]
        if spec.kind is PayloadKind.SAMPLED:
            return Scores(sampled=sampled)
        ids = item.gather_ids
        if ids is None:
            ids = np.argsort(-log_probs, axis=1, kind="stable")[:, : spec.k].astype(np.uint32)
        values = np.take_along_axis(log_probs, ids.astype(np.int64), axis=1)
        rest = np.exp(log_probs.astype(np.float64))
        np.put_along_axis(rest, ids.astype(np.int64), 0.0, axis=1)
        with np.errstate(divide="ignore"):
            log_tail = np.log(rest.sum(axis=1)).astype(np.float32)
        return Scores(sampled=sampled, values=values, ids=ids, log_tail=log_tail)

    def head(self) -> Head:
        return Head(self._head, None, "f32", 1.0, 0.0, self._head_identity.hash)

    def update_weights(self, folder: Path) -> None:
        self._weights(int((folder / "seed").read_text()))

    def sleep(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def close(self) -> None:
        self.closed = True


def expected(engine: NumpyEngine, item: ScoreItem, spec: PayloadSpec, temperature: float = 1.0) -> Scores:
    """What the engine says without any server."""
    return engine._one(EngineItem(item, spec, temperature))


@dataclass
class Client:
    """A thin client of one running server."""

    server: TeacherServer
    engines: dict[str, NumpyEngine]
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

    async def score(
        self, items: list[ScoreItem], spec: PayloadSpec, *, teacher: str = "t", timeout: float = 60.0, **options: Any
    ) -> list[Scores]:
        bounds = RequestBounds.from_info(await self.info(teacher))
        request_id = f"r{next(self.ids)}"
        message = build_score_request(items, spec, teacher=teacher, request_id=request_id, **options)
        decoder = ScoreStreamDecoder(
            items,
            spec,
            bounds,
            request_id=request_id,
            first_sequence=message.first_sequence,
            shared_memory=bool(message.shared_memory_token),
        )
        async for response in self.stub.Score(message, timeout=timeout, metadata=self.security.metadata()):
            decoder.feed(response)
        return decoder.finish()

    async def settled(self, seconds: float = 30.0) -> None:
        """Wait until nothing is in flight, then check that all was released, exactly once."""
        budget = self.server.shared.budget
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            idle = all(t.in_flight == 0 for t in self.server.shared.roster)
            if idle and budget.opened == budget.closed and self.server.shared.metrics.calls._value.get() == 0:
                break
            await asyncio.sleep(0.01)
        assert budget.opened == budget.closed
        assert (budget.used.tokens, budget.used.reply_bytes) == (0, 0)
        assert budget._held == {}
        for teacher in self.server.shared.roster:
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


@pytest.fixture
def numpy_engine() -> type[NumpyEngine]:
    return NumpyEngine


Start = Callable[..., Awaitable[Client]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(**settings)` runs a server with teacher "t"; all are closed at the end."""
    clients: list[Client] = []

    async def run(
        teachers: dict[str, str] | None = None,
        *,
        security: ClientSecurity | None = None,
        make: Callable[[str], NumpyEngine] | None = None,
        **settings: Any,
    ) -> Client:
        settings.setdefault("metrics_port", -1)
        settings.setdefault("settle_seconds", 0.0)
        settings.setdefault("transport", {"shared_memory": False})
        limits = {"max_k": VOCAB, "allow_full": True, **settings.pop("limits", {})}
        engines: dict[str, NumpyEngine] = {}

        def factory(model: str) -> NumpyEngine:
            engines[model] = (make or NumpyEngine)(model)
            return engines[model]

        server = TeacherServer(ServerSettings(limits=limits, **settings), factory)
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
def changed() -> Callable[..., Any]:
    """`dataclasses.replace`, for tests that bend a result."""
    return replace
