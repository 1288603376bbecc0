"""A teacher server that fails: named points at which tests can stop a call, and random failures for chaos runs.

`python -m faulty_server --fault "unavailable=0.05,corrupt=0.01,latency=0.5s,seed=1" ...` serves like `opd serve ...`,
and fails in these ways, drawn from a seeded generator. Each key is a probability per Score call unless a unit is given:

| key         | effect                                                                             |
|-------------|------------------------------------------------------------------------------------|
| unavailable | the call ends with UNAVAILABLE before any work                                     |
| cut         | the stream ends with UNAVAILABLE after its first sequence                          |
| corrupt     | one bit of one chunk is flipped after its checksum was taken                       |
| lie         | one probability is too large, under a correct checksum                             |
| mislead     | scores are those of another model and pass every check, except for calls that ask  |
|             | for sampled log-probs of a single row, as clients do to compare replicas           |
| hang        | the call is never answered                                                         |
| kill        | the process dies at once, as by SIGKILL                                            |
| latency     | a duration such as 0.5s that every call waits before it is admitted                |
| seed        | seed of the generator, 0 by default                                                |
"""

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from opd.errors import ConfigError, UnavailableError
from opd.wire.encoder import EncodedSequence
from opd.wire.request import ParsedRequest
from opd.wire.tensors import bf16_bits, bf16_to_f32
from opd.wire.types import PayloadKind, Scores, Timings
from teacher_server.engines.base import Engine, EngineItem
from teacher_server.rpc.sender import Sender
from teacher_server.rpc.stream_call import StreamCall
from teacher_server.server import TeacherServer

POINTS = (
    "admitted",
    "parsed",
    "queued",
    "engine_start",
    "engine_end",
    "result_ready",
    "header_sent",
    "encoded",
    "sequence_sent",
    "chunk_sent",
    "before_trailer",
    "after_trailer",
)
"""Points at which a Score call can be stopped; engine_start and engine_end are on the engine's thread."""


class FaultPoints:
    """Hooks at named points."""

    def __init__(self) -> None:
        self._hooks: dict[str, Callable[[], Awaitable[None]]] = {}
        self._sync_hooks: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()

    def set(self, point: str, hook: Callable[[], Awaitable[None]]) -> None:
        """Await `hook()` whenever the event loop reaches `point`."""
        _known(point)
        self._hooks[point] = hook

    def set_sync(self, point: str, hook: Callable[[], None]) -> None:
        """Call `hook()` whenever the engine's thread reaches `point`."""
        _known(point)
        with self._lock:
            self._sync_hooks[point] = hook

    def clear(self) -> None:
        """Remove all hooks."""
        self._hooks.clear()
        with self._lock:
            self._sync_hooks.clear()

    async def reach(self, point: str) -> None:
        """Run the hook of `point`, if any."""
        hook = self._hooks.get(point)
        if hook is not None:
            await hook()

    def reach_sync(self, point: str) -> None:
        """Run the hook of `point` on this thread, if any."""
        hook = self._sync_hooks.get(point)
        if hook is not None:
            hook()

    def around(self, engine: Any) -> Any:
        """The engine, with the points engine_start and engine_end at the two ends of `score`."""
        score = engine.score

        def stopped(batch: Sequence[EngineItem]) -> Any:
            self.reach_sync("engine_start")
            scores = score(batch)
            self.reach_sync("engine_end")
            return scores

        engine.score = stopped
        return engine


def _known(point: str) -> None:
    if point not in POINTS:
        raise ValueError(f"point must be one of {', '.join(POINTS)}, but it is {point!r}.")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The probabilities and durations of a chaos run; all zero by default."""

    unavailable: float = 0.0
    cut: float = 0.0
    corrupt: float = 0.0
    lie: float = 0.0
    mislead: float = 0.0
    hang: float = 0.0
    kill: float = 0.0
    latency: float = 0.0
    seed: int = 0

    @classmethod
    def parse(cls, spec: str) -> "FaultPlan":
        """Parse "key=value,key=value"; "" stands for no faults.

        Raises:
            ConfigError: for an unknown key or a value out of range.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (p.strip() for p in spec.split(","))):
            key, _, text = part.partition("=")
            if key not in cls.__dataclass_fields__:
                raise ConfigError(f"fault {key!r} is unknown; use one of {', '.join(cls.__dataclass_fields__)}.")
            try:
                value = int(text) if key == "seed" else float(text.removesuffix("s") if key == "latency" else text)
            except ValueError:
                raise ConfigError(f"fault {part!r} needs a number, for example {key}=0.1.") from None
            if value < 0 or (key not in ("seed", "latency") and value > 1):
                raise ConfigError(
                    f"fault {part!r} is out of range; give a probability from 0 to 1, or 0 or more for latency and "
                    "seed."
                )
            values[key] = value
        return cls(**values)


class FaultInjector:
    """Draws the faults of each Score call."""

    def __init__(self, plan: FaultPlan) -> None:
        self._plan = plan
        self._random = random.Random(plan.seed)
        # With a generator of its own, so that this fault does not change how a seed draws the others.
        self._misleads = random.Random(f"mislead {plan.seed}")

    def draw(self) -> "CallFaults":
        """The faults of the next call; the number of draws is fixed, so that one key does not shift the others."""
        plan, draw = self._plan, self._random.random
        return CallFaults(
            unavailable=draw() < plan.unavailable,
            cut=draw() < plan.cut,
            corrupt=draw() < plan.corrupt,
            lie=draw() < plan.lie,
            mislead=self._misleads.random() < plan.mislead,
            hang=draw() < plan.hang,
            kill=draw() < plan.kill,
            latency=plan.latency,
        )


@dataclass(slots=True)
class CallFaults:
    """The faults of one call."""

    unavailable: bool = False
    cut: bool = False
    corrupt: bool = False
    lie: bool = False
    mislead: bool = False
    hang: bool = False
    kill: bool = False
    latency: float = 0.0

    async def at_start(self) -> None:
        """Apply the faults that take effect before the call is admitted."""
        if self.kill:
            os._exit(137)
        if self.latency:
            await asyncio.sleep(self.latency)
        if self.hang:
            await asyncio.Event().wait()
        if self.unavailable:
            raise UnavailableError("injected fault: unavailable.")

    def on_scores(self, scores: Scores, *, comparing: bool = False) -> Scores:
        """Make one number impossible, once; or replace all by another model's, unless replicas are being compared."""
        if self.mislead and not comparing:
            return _of_another_model(scores)
        if not self.lie:
            return scores
        self.lie = False
        if scores.log_tail is not None:
            # A copy, because the sequences of a batch may share the engine's array.
            tail = scores.log_tail.copy()
            tail[0] = 0.0
            return replace(scores, log_tail=tail)
        if scores.sampled is not None:
            sampled = scores.sampled.copy()
            sampled[0] = 1.0
            return replace(scores, sampled=sampled)
        return scores

    def on_chunk(self, message: bytes) -> bytes:
        """Flip a bit in the last byte of a chunk's serialised message, once."""
        if not self.corrupt:
            return message
        self.corrupt = False
        return message[:-1] + bytes([message[-1] ^ 0x40])

    def after_sequence(self) -> None:
        """Cut the stream, once."""
        if self.cut:
            self.cut = False
            raise UnavailableError("injected fault: cut.")


class FaultySender(Sender):
    """A sender that damages chunks, and stops after each."""

    def __init__(self, whole: Sender, points: FaultPoints, faults: CallFaults) -> None:
        super().__init__(whole._write, whole._limit, batches=whole._batches)
        self._points, self._faults = points, faults

    async def send(self, message: Any) -> None:
        """Only chunks come as bytes."""
        if not isinstance(message, bytes):
            return await super().send(message)
        await super().send(self._faults.on_chunk(message))
        await self._points.reach("chunk_sent")


class FaultyCall(StreamCall):
    """A Score call that stops at the points, and fails as its faults say."""

    def __init__(self, points: FaultPoints, injector: FaultInjector, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._points, self._faults = points, injector.draw()
        self._sender = FaultySender(self._sender, points, self._faults)

    async def run(self) -> Timings:
        await self._faults.at_start()
        return await super().run()

    async def _parse(self, *args: Any) -> ParsedRequest:
        await self._points.reach("admitted")
        request = await super()._parse(*args)
        await self._points.reach("parsed")
        return request

    async def _stream(self, *args: Any) -> Timings:
        await self._points.reach("queued")
        return await super()._stream(*args)

    async def _result(self, *args: Any) -> tuple[Scores, str]:
        result = await super()._result(*args)
        await self._points.reach("result_ready")
        return result

    async def _send_header(self, *args: Any) -> None:
        await super()._send_header(*args)
        await self._points.reach("header_sent")

    async def _encode(self, scores: Scores, request: ParsedRequest, *args: Any) -> EncodedSequence:
        # `mislead` spares the scores by which replicas are compared, which have this form.
        comparing = len(request.items) == 1 and request.spec.kind is PayloadKind.SAMPLED
        scores = self._faults.on_scores(scores, comparing=comparing)
        encoded = await super()._encode(scores, request, *args)
        del scores
        await self._points.reach("encoded")
        return encoded

    async def _answer(self, *args: Any) -> None:
        await super()._answer(*args)
        await self._points.reach("sequence_sent")
        self._faults.after_sequence()

    async def _send_trailer(self) -> Timings:
        await self._points.reach("before_trailer")
        timings = await super()._send_trailer()
        await self._points.reach("after_trailer")
        return timings


class FaultyServer(TeacherServer):
    """A teacher server whose calls stop at `points` and fail as `fault` says; see `FaultPlan.parse`."""

    def __init__(self, settings: Any, factory: Callable[[str], Engine], fault: str = "") -> None:
        self.points = FaultPoints()
        self.score_call = partial(FaultyCall, self.points, FaultInjector(FaultPlan.parse(fault)))
        super().__init__(settings, lambda model: self.points.around(factory(model)))


def _of_another_model(scores: Scores) -> Scores:
    """Scores of a model that gives each listed token a nat less, and its mass to the others: wrong, but consistent."""
    if scores.hidden is not None:
        hidden = scores.hidden
        if hidden.dtype == np.uint16:
            return replace(scores, hidden=bf16_bits(0.5 * bf16_to_f32(hidden.view(np.uint16))))
        return replace(scores, hidden=np.float32(0.5) * hidden.astype(np.float32))
    if scores.logits is not None:
        return replace(scores, logits=0.5 * scores.logits)
    changed = scores
    if scores.sampled is not None:
        changed = replace(changed, sampled=scores.sampled - np.float32(1))
    if scores.values is not None:
        values = scores.values.astype(np.float32) - np.float32(1)
        with np.errstate(divide="ignore"):
            rest = np.log(np.maximum(1 - np.exp(values.astype(np.float64)).sum(axis=1), 0)).astype(np.float32)
        changed = replace(changed, values=values, log_tail=rest)
    return changed
