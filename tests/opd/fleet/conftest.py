"""A small teacher server that speaks the real contract over real gRPC, and can be told to misbehave."""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from ports import held_port
from waiting import PATIENCE, wait_until

from opd.errors import OpdError
from opd.fleet.membership import members
from opd.fleet.settings import CallSettings, FleetSettings, HealthSettings, OutageSettings
from opd.wire.bounds import RequestBounds
from opd.wire.encoder import chunk_messages, encode_scores
from opd.wire.fingerprint import head_hash
from opd.wire.head import encode_head, head_info
from opd.wire.request import parse_score_request
from opd.wire.spans import cut, whole
from opd.wire.status import status_of
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

VOCAB, HIDDEN = 64, 8
LONGEST_ITEM = 32


class TinyModel:
    """Hidden state from (previous id, position), a random head: exact, deterministic, instant."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        rng = np.random.default_rng(seed)
        self.vocab = vocab
        self.states = rng.normal(size=(vocab, HIDDEN)).astype(np.float32)
        self.head = rng.normal(size=(vocab, HIDDEN)).astype(np.float32)
        self.weights_hash = hashlib.sha256(self.states.tobytes() + self.head.tobytes()).hexdigest()

    def score(self, item: ScoreItem, spec: PayloadSpec, temperature: float) -> Scores:
        before = item.token_ids[item.prompt_length - 1 : -1]
        hidden = self.states[before] + 0.01 * np.arange(item.response_length, dtype=np.float32)[:, None]
        logits = (hidden @ self.head.T).astype(np.float32) / np.float32(temperature)
        shift = logits.max(-1, keepdims=True)
        log_probs = logits - shift - np.log(np.exp(logits - shift).sum(-1, keepdims=True))
        rows = np.arange(item.response_length)
        sampled = log_probs[rows, item.response_ids].astype(np.float32)
        if spec.kind is PayloadKind.SAMPLED:
            return Scores(sampled=sampled)
        if spec.kind is PayloadKind.HIDDEN:
            return Scores(hidden=hidden.astype(np.float32))
        if spec.kind is PayloadKind.FULL:
            return Scores(logits=logits)
        gather = spec.kind is PayloadKind.GATHER
        ids = item.gather_ids if gather else np.argsort(-log_probs, -1, kind="stable")[:, : spec.k]
        assert ids is not None
        rest = log_probs.copy()
        np.put_along_axis(rest, ids.astype(np.int64), -np.inf, -1)
        with np.errstate(divide="ignore"):
            tail = np.log(np.exp(rest).sum(-1)).astype(np.float32)
        values = np.take_along_axis(log_probs, ids.astype(np.int64), -1)
        return Scores(sampled=sampled, values=values, ids=ids.astype(np.uint32), log_tail=tail)


def _serialise(message: Any) -> bytes:
    """The message's bytes; bytes are sent as they are, so that a test can send what is not a message."""
    return message if isinstance(message, bytes) else message.SerializeToString()


def _handlers(server: "FakeServer") -> grpc.GenericRpcHandler:
    def late(name: str) -> Callable[[Any, Any], Any]:
        """The method as it is when it is called: a test may replace it."""

        def call(request: Any, context: Any) -> Any:
            return getattr(server, name)(request, context)

        return call

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    return grpc.method_handlers_generic_handler(
        "opd.wire.v1.TeacherService",
        {
            "Describe": unary(late("Describe"), pb.DescribeRequest.FromString, _serialise),
            "GetLoad": unary(late("GetLoad"), pb.GetLoadRequest.FromString, _serialise),
            "GetHead": stream(late("GetHead"), pb.GetHeadRequest.FromString, _serialise),
            "Score": stream(late("Score"), pb.ScoreRequest.FromString, _serialise),
        },
    )


def is_check(request: pb.ScoreRequest) -> bool:
    """Whether a request seems to compare replicas: those of `make_items` have shorter rows."""
    sequences = request.sequences
    return request.HasField("sampled") and len(sequences) == 1 and len(sequences[0].token_ids) > 4 * LONGEST_ITEM


class FakeServer:
    """Serves models by name. Knobs: `delay` seconds per row, `wedged` (never answers Score), `trouble(request)` may
    raise an OpdError, `mangle(messages)` may change the answer, `draining`, `state`, `loading` (names that
    only GetLoad lists), `failed` (likewise), `deaf` (answers nothing), `spans`
    (scores parts of responses, as servers do that know them), `request_bytes` (most of a request), `live_model` (scores
    rows, but not those that compare replicas)."""

    def __init__(
        self, models: dict[str, TinyModel], port: int = 0, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self.models = models
        self.delay = 0.0
        self.wedged = False
        self.deaf = False
        self.spans = False
        self.request_bytes = 1 << 20
        self.draining = False
        self.refusal = ""
        self.state = pb.TEACHER_STATE_READY
        self.loading: list[str] = []
        self.failed: list[str] = []
        self.trouble: Callable[[pb.ScoreRequest], None] = lambda request: None
        self.mangle: Callable[[list[Any]], list[Any]] = lambda messages: messages
        self.live_model: TinyModel | None = None
        self.requests: list[pb.ScoreRequest] = []
        self.heads = 0
        self.cancelled = 0
        self.instance = uuid.uuid4().hex
        self._stopping = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(24), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((_handlers(self),))
        where = f"127.0.0.1:{port or held_port()}"
        if credentials is None:
            self.port = self._server.add_insecure_port(where)
        else:
            self.port = self._server.add_secure_port(where, credentials)
        self._server.start()
        self.address = f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._stopping.set()
        self._server.stop(0).wait()

    def info(self, name: str) -> pb.TeacherInfo:
        model = self.models[name]
        return pb.TeacherInfo(
            name=name,
            engine="fake 1",
            weights_hash=model.weights_hash,
            compute_dtype=pb.DTYPE_F32,
            vocab_size=model.vocab,
            tokenizer=pb.TokenizerInfo(fingerprint="f" * 64, size=model.vocab, eos_id=-1, bos_id=-1, pad_id=-1),
            head=head_info(self.head_of(name)),
            payloads=[pb.PAYLOAD_KIND_SAMPLED, pb.PAYLOAD_KIND_TOPK, pb.PAYLOAD_KIND_GATHER, pb.PAYLOAD_KIND_HIDDEN],
            supports_temperature=True,
            limits=pb.Limits(
                max_sequence_tokens=512,
                max_k=32,
                max_sequences=32,
                max_request_tokens=8192,
                max_request_bytes=self.request_bytes,
            ),
            deterministic=True,
            state=pb.TEACHER_STATE_DRAINING if self.draining else self.state,
            supports_spans=self.spans,
        )

    def head_of(self, name: str) -> Head:
        weight = self.models[name].head
        made = Head(weight, None, "f32", 1.0, 0.0, "")
        return Head(weight, None, "f32", 1.0, 0.0, head_hash(made))

    def scored_rows(self) -> int:
        return sum(len(request.sequences) for request in self.requests)

    def _maybe_deaf(self, context: Any) -> None:
        while self.deaf and context.is_active() and not self._stopping.wait(0.02):
            pass

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        self._maybe_deaf(context)
        if self.refusal:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, self.refusal)
        teachers = [self.info(name) for name in self.models]
        return pb.DescribeResponse(teachers=teachers, server_version="0.1", instance_id=self.instance)

    def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        self._maybe_deaf(context)
        state = pb.TEACHER_STATE_DRAINING if self.draining else self.state
        loads = [pb.TeacherLoad(teacher=name, queued_tokens=7, state=state) for name in self.models]
        loads += [pb.TeacherLoad(teacher=name, state=pb.TEACHER_STATE_LOADING) for name in self.loading]
        loads += [pb.TeacherLoad(teacher=name, state=pb.TEACHER_STATE_FAILED) for name in self.failed]
        return pb.GetLoadResponse(teachers=loads, instance_id=self.instance)

    def GetHead(self, request: pb.GetHeadRequest, context: Any) -> Iterator[pb.GetHeadResponse]:
        self.heads += 1
        yield from encode_head(self.head_of(request.teacher), 65_536)

    def Score(self, request: pb.ScoreRequest, context: Any) -> Iterator[pb.ScoreResponse]:
        try:
            yield from self._score(request, context)
        except OpdError as error:
            found = status_of(error)
            context.set_trailing_metadata(found.trailers)
            context.abort(found.code, found.message)

    def _score(self, request: pb.ScoreRequest, context: Any) -> Iterator[pb.ScoreResponse]:
        self._maybe_deaf(context)
        model = self.models[request.teacher]
        parsed = parse_score_request(request, RequestBounds.from_info(self.info(request.teacher)))
        comparing = is_check(request)
        if not comparing:
            self.requests.append(request)
            self.trouble(request)
            while self.wedged and context.is_active() and not self._stopping.wait(0.02):
                pass
        messages = [
            pb.ScoreResponse(
                header=pb.ScoreHeader(
                    request_id=request.request_id, weights_hash=model.weights_hash, sequence_count=len(parsed.items)
                )
            )
        ]
        for index, item in enumerate(parsed.items):
            deadline = time.monotonic() + self.delay
            while not comparing and time.monotonic() < deadline:
                if not context.is_active():
                    self.cancelled += 1
                    return
                time.sleep(min(0.005, self.delay))
            speaker = model if comparing or self.live_model is None else self.live_model
            scores = cut(speaker.score(whole(item), parsed.spec, parsed.temperature), item)
            rows = item.scored_length
            encoded = encode_scores(scores, parsed.spec, rows, vocab_size=model.vocab, hidden_size=HIDDEN)
            messages.append(encoded.header(index, parsed.ids_crc32c[index]))
            messages += [pb.ScoreResponse(chunk=chunk) for chunk in chunk_messages(encoded.buffers, 65_536)]
        messages.append(pb.ScoreResponse(trailer=pb.ScoreTrailer(timings=pb.Timings(total_seconds=0.5))))
        yield from self.mangle(messages) if not comparing else messages


def make_items(count: int, *, seed: int = 0, vocab: int = VOCAB, gather: int = 0) -> list[ScoreItem]:
    """Rows of random ids with 2 to 8 prompt and 1 to 24 response tokens."""
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 25))
        ids = rng.integers(0, vocab, prompt + response, dtype=np.uint32)
        picks = None
        if gather:
            picks = np.stack([rng.permutation(vocab)[:gather] for _ in range(response)]).astype(np.uint32)
        items.append(ScoreItem(ids, prompt, picks))
    return items


FAST = FleetSettings(
    health=HealthSettings(ping_seconds=0.2, ping_timeout_seconds=PATIENCE, revive_seconds=0.05, cool_off_seconds=0.1),
    outage=OutageSettings(budget_seconds=PATIENCE, emergency_after_seconds=0.4, notice_seconds=0.2),
    calls=CallSettings(backoff_seconds=0.01, attempt_seconds=2 * PATIENCE),
    connect_seconds=PATIENCE,
    discovery_seconds=0.1,
)
"""Looks often and gives up late: on a busy machine everything answers, at some time."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """serve(seed=..., names=..., port=...) starts a server; every server is stopped at the end of the test."""
    monkeypatch.setattr(members, "_SETTLE_SECONDS", PATIENCE)  # all servers vote, however busy the machine
    running: list[FakeServer] = []

    def serve(
        seed: int = 1,
        names: tuple[str, ...] = ("math",),
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> FakeServer:
        server = FakeServer({name: TinyModel(seed + 100 * i) for i, name in enumerate(names)}, port, credentials)
        running.append(server)
        return server

    yield SimpleNamespace(serve=serve, settings=FAST, items=make_items, model=TinyModel, wait_until=wait_until)
    for server in running:
        server.stop()
