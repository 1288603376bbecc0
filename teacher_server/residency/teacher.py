"""A teacher on a server: its engine's worker, its state and bounds, and the self-test that it must pass to be ready."""

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
from teacher_server.settings import LimitSettings

SELF_TEST_TOKENS = 8

SERVING_STATES = (pb.TEACHER_STATE_READY, pb.TEACHER_STATE_ASLEEP)


@dataclass(slots=True, eq=False)
class Teacher:
    """A teacher and its state, which only the event loop changes.

    Attributes:
        name: the name by which clients address it.
        model: path or hub id.
        limits: the server's limits on requests.
        state: a `TeacherState` of the contract.
        reason: why it failed; "" otherwise.
        worker: runs the engine; None while it is being loaded, and after it failed.
        in_flight: number of Score and GetHead calls that keep it awake.
        last_used: when a call last began or ended, in monotonic seconds.
        weight_bytes: bytes that its weights take when awake; 0 while unknown.
        held_bytes: bytes of the memory budget that it uses or has reserved.
        restarts: number of times its engine was loaded again since the server started.
        replaced: folder and hash of the weights that replaced the model's own; None while those are in use.
        idle: set while no call is in flight.
        changing: held while it is loaded, woken, put to sleep or unloaded.
        unloads: number of calls that wait to unload it.
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
        """Whether it accepts requests; they wake a teacher that sleeps."""
        return self.state in SERVING_STATES

    @property
    def info(self) -> EngineInfo:
        """What its engine reports at present.

        Raises:
            UnavailableError: while it is being loaded, or if it failed.
        """
        return self.running().engine.info

    @property
    def bounds(self) -> RequestBounds:
        """What a request may ask for at present."""
        return request_bounds(self.name, self.info, self.limits)

    def running(self) -> EngineWorker:
        """Its worker.

        Raises:
            UnavailableError: while the teacher is being loaded, or if it failed.
        """
        if self.worker is None:
            raise self._refusal()
        return self.worker

    def require_ready(self) -> None:
        """Refuse what needs a teacher that is ready to score.

        Raises:
            UnavailableError: if it is in any other state.
        """
        if self.state != pb.TEACHER_STATE_READY:
            raise self._refusal()

    def _refusal(self) -> UnavailableError:
        # A call may have waited for a teacher that was unloaded meanwhile.
        name = pb.TeacherState.Name(self.state) if self.state else "unloaded"  # type: ignore[arg-type]
        state = name.removeprefix("TEACHER_STATE_").lower()
        return UnavailableError(f"teacher {self.name!r} is {state}{': ' + self.reason if self.reason else ''}.")

    def enter(self) -> None:
        """Count a call that needs the teacher awake."""
        self.in_flight += 1
        self.idle.clear()
        self.last_used = time.monotonic()

    def leave(self) -> None:
        """Count such a call as ended."""
        self.in_flight -= 1
        self.last_used = time.monotonic()
        if self.in_flight == 0:
            self.idle.set()


def request_bounds(name: str, info: EngineInfo, limits: LimitSettings) -> RequestBounds:
    """What a teacher accepts: the engine's abilities, within the server's limits."""
    payloads = info.payloads if limits.allow_full else info.payloads - {PayloadKind.FULL}
    longest = info.max_sequence_tokens
    if limits.max_sequence_tokens:
        longest = min(longest, limits.max_sequence_tokens)
    request_tokens = min(limits.max_request_tokens, limits.max_tokens_in_flight)
    return RequestBounds(
        teacher=name,
        vocab_size=info.vocab_size,
        payloads=payloads,
        supports_temperature=info.supports_temperature,
        max_sequence_tokens=min(longest, request_tokens),
        max_k=min(info.max_k, limits.max_k, info.vocab_size),
        max_sequences=limits.max_sequences,
        max_request_tokens=request_tokens,
        max_request_bytes=limits.max_request_bytes,
        hidden_size=info.head.hidden_size if info.head else 0,
        spans=info.spans,
    )


def self_test(engine: Engine, name: str) -> None:
    """Score a short sequence twice through the whole codec; this also warms the engine up.

    The scores must pass the decoder's checks, as on a client, and must be equal when repeated: bit for bit if the
    engine claims to be deterministic, else within a tolerance.

    Raises:
        UnavailableError: if they are not.
    """
    info = engine.info
    bounds = request_bounds(name, info, LimitSettings(allow_full=True))
    length = min(SELF_TEST_TOKENS, bounds.max_sequence_tokens)
    # Arbitrary ids, all different in any usual vocabulary; the test needs no tokenizer.
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
                raise UnavailableError(
                    f"teacher {name!r} failed its self-test with payload {spec.kind}: {field_name} differed when the "
                    "same sequence was scored again."
                )


def _through_the_codec(engine: Engine, item: ScoreItem, spec: PayloadSpec, bounds: RequestBounds) -> Scores:
    scores = engine.score([EngineItem(item, spec)])[0]
    if scores is None:
        raise UnavailableError("the engine returned no scores for the sequence.")
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
