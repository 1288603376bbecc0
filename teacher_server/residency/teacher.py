"""One teacher on a server: its engine's worker, its state, its bounds, and the self-test that gates readiness."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from opd.errors import UnavailableError
from opd.wire.bounds import RequestBounds
from opd.wire.checksum import crc32c
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.encoder import chunk_messages, encode_scores
from opd.wire.request import token_bytes
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.batching.worker import EngineWorker
from teacher_server.engines.base import Engine, EngineInfo, EngineItem
from teacher_server.rpc.describe import request_bounds
from teacher_server.settings import LimitSettings

SELF_TEST_TOKENS = 8

SERVING_STATES = (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)


@dataclass(slots=True, eq=False)
class Teacher:
    """A teacher and its state; the event loop owns it.

    Attributes:
        name: as clients know it.
        model: path or hub id.
        limits: of the server.
        state: of the contract.
        reason: why it failed, "" otherwise.
        worker: runs the engine; None while it is loaded.
        in_flight: Score and GetHead calls that hold it awake.
        last_used: seconds, monotonic.
        weight_bytes: of its weights when awake, 0 while unknown.
        held_bytes: of the memory budget, in use by it or reserved for it.
        restarts: since the start of the server.
        replaced: folder and hash of the weights that replaced the model's own; None while those are in use.
        idle: set while no call is in flight.
        changing: held while it is loaded, woken, put to sleep or unloaded.
        unloads: calls that wait to unload it.
        drained_from: its state before the first of them.
    """

    name: str
    model: str
    limits: LimitSettings
    state: int = pb.TEACHER_STATE_LOADING
    reason: str = ""
    worker: EngineWorker | None = None
    in_flight: int = 0
    last_used: float = 0.0
    weight_bytes: int = 0
    held_bytes: int = 0
    restarts: int = 0
    replaced: tuple[Path, str] | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    unloads: int = 0
    drained_from: int = pb.TEACHER_STATE_UNSPECIFIED

    @property
    def serving(self) -> bool:
        """Whether it takes requests; they wake a teacher that sleeps."""
        return self.state in SERVING_STATES

    @property
    def info(self) -> EngineInfo:
        """What the engine says now.

        Raises:
            UnavailableError: while it is loaded, or when it failed.
        """
        return self.running().engine.info

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask now."""
        return request_bounds(self.name, self.info, self.limits)

    def running(self) -> EngineWorker:
        """The worker.

        Raises:
            UnavailableError: while the teacher is loaded, or when it failed.
        """
        if self.worker is None:
            raise self._refusal()
        return self.worker

    def require_ready(self) -> None:
        """Refuse what needs a teacher that scores now.

        Raises:
            UnavailableError: when it is in any other state.
        """
        if self.state != pb.TEACHER_STATE_READY:
            raise self._refusal()

    def _refusal(self) -> UnavailableError:
        # A call may have waited for what was unloaded meanwhile.
        name = pb.TeacherState.Name(self.state) if self.state else "unloaded"  # type: ignore[arg-type]
        state = name.removeprefix("TEACHER_STATE_").lower()
        return UnavailableError(f"teacher {self.name!r} is {state}{': ' + self.reason if self.reason else ''}.")

    def enter(self) -> None:
        """Count a call that needs the teacher awake."""
        self.in_flight += 1
        self.idle.clear()
        self.last_used = time.monotonic()

    def leave(self) -> None:
        """Count a call that no longer needs it."""
        self.in_flight -= 1
        self.last_used = time.monotonic()
        if self.in_flight == 0:
            self.idle.set()


def self_test(engine: Engine, name: str) -> None:
    """Score a short sequence through the whole codec, twice; warms the engine up.

    The answers must be possible (the decoder checks what it checks on a client) and equal when repeated, bit for bit
    when the engine claims to be deterministic.

    Raises:
        UnavailableError: when they are not.
    """
    info = engine.info
    bounds = request_bounds(name, info, LimitSettings(allow_full=True))
    length = min(SELF_TEST_TOKENS, bounds.max_sequence_tokens)
    # Ids of no meaning, different from each other in any usual vocabulary: the test needs no tokenizer.
    ids = (np.arange(length, dtype=np.uint32) * 7 + 3) % np.uint32(info.vocab_size)
    specs = [PayloadSpec.sampled()] if PayloadKind.SAMPLED in info.payloads else []
    if PayloadKind.TOPK in info.payloads:
        specs.append(PayloadSpec.topk(min(4, bounds.max_k), "f32"))
    if PayloadKind.HIDDEN in info.payloads:
        specs.append(PayloadSpec.hidden("f32"))
    item = ScoreItem(ids, 1)
    for spec in specs:
        try:
            first, second = (_through_the_codec(engine, item, spec, bounds) for _ in range(2))
        except Exception as error:
            raise UnavailableError(
                f"teacher {name!r} failed its self-test with payload {spec.kind}: {error}"
            ) from error
        for field_name in ("sampled", "values", "hidden"):
            a, b = getattr(first, field_name), getattr(second, field_name)
            if a is None:
                continue
            same = np.array_equal(a, b) if info.deterministic else np.allclose(a, b, rtol=2e-2, atol=5e-2)
            if not same:
                raise UnavailableError(f"teacher {name!r} failed its self-test: {field_name} differs when repeated.")


def _through_the_codec(engine: Engine, item: ScoreItem, spec: PayloadSpec, bounds: RequestBounds) -> Scores:
    scores = engine.score([EngineItem(item, spec)])[0]
    if scores is None:
        raise UnavailableError("the engine skipped the sequence.")
    encoded = encode_scores(
        scores, spec, item.response_length, vocab_size=bounds.vocab_size, hidden_size=bounds.hidden_size
    )
    decoder = ScoreStreamDecoder([item], spec, bounds)
    decoder.feed(pb.ScoreResponse(header=pb.ScoreHeader(sequence_count=1)))
    decoder.feed(encoded.header(0, crc32c(token_bytes(item.token_ids))))
    for chunk in chunk_messages(encoded.buffers, 1 << 20):
        decoder.feed(pb.ScoreResponse(chunk=chunk))
    decoder.feed(pb.ScoreResponse(trailer=pb.ScoreTrailer()))
    return decoder.finish()[0]
