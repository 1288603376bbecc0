"""The ASGI app of the HTTP door: who calls, what is asked, and errors as statuses.

    GET  /health                                            200 while the server serves; asks for no token
    GET  /v1/models                                         the teachers, with their fingerprints
    POST /v1/completions                                    `teacher_server.http.vllm`
    POST /inference/v1/generate, /api/v1/generate           `teacher_server.http.vllm`
    POST /generate                                          `teacher_server.http.sglang`

A call with a bearer token may also send it as the password of Basic authentication, for clients that can put a name and
a password into a URL and nothing else.
"""

import asyncio
import base64
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from opd.errors import AuthError, InvalidRequestError, OpdError, OverloadedError, UnavailableError
from opd.wire.bounds import RequestBounds
from teacher_server.calls.account import serve
from teacher_server.calls.caller import CALLER, Caller, peer_address
from teacher_server.calls.endings import release
from teacher_server.calls.gate import Gate
from teacher_server.calls.score_call import Shared
from teacher_server.http import sglang, vllm
from teacher_server.http.body import parse_body, read_body
from teacher_server.http.call import BodyCall
from teacher_server.http.question import Question
from teacher_server.rpc.receive import RequestReceiver

_log = logging.getLogger(__name__)

Ask = Callable[[dict[str, Any], str, RequestBounds], Question]
Handler = Callable[[Request, Caller, Send], Awaitable[None]]

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "DATA_LOSS": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    # 503 and not 429: TRL's client repeats a request after 500, 502 and 503 only.
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
CLOSE = (b"connection", b"close")


class Door:
    """The app.

    Args:
        shared: what all calls of the server share.
        gate: lets calls in.
        receiver: bounds the requests that are being received.
        serving: whether the server is healthy.
    """

    def __init__(self, shared: Shared, gate: Gate, receiver: RequestReceiver, serving: Callable[[], bool]) -> None:
        self._shared = shared
        self._gate = gate
        self._receiver = receiver
        self._serving = serving
        self._created = int(time.time())
        posts = {
            "/v1/completions": vllm.completions,
            "/inference/v1/generate": vllm.generate,
            "/api/v1/generate": vllm.generate,
            "/generate": sglang.generate,
        }
        routes = [Route("/health", _Endpoint(self, "", self._health), methods=["GET"])]
        routes += [Route("/v1/models", _Endpoint(self, "score", self._models), methods=["GET"])]
        routes += [Route(p, _Endpoint(self, "score", self._scores(ask)), methods=["POST"]) for p, ask in posts.items()]
        self.app = Router(routes, redirect_slashes=False)

    async def call(self, scope_name: str, handler: Handler, request: Request, send: Send) -> None:
        """Let a call in, run its handler, and answer with its error if it fails."""
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            caller = self._gate.identify(_address(request), _metadata(request), scope_name)
            with self._gate.hold(caller):
                CALLER.set(caller)
                await handler(request, caller, sending)
                return
        except OpdError as error:
            status, fields = _STATUSES.get(error.status or "", 500), _error(error)
            wait = error.retry_after if isinstance(error, OverloadedError) else 1.0
            release(error)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            status, wait = 503, 1.0
            fields = _error(UnavailableError("the server ended before the call did; ask another replica."))
        except Exception as error:
            text = self._gate.unexpected(request.scope["path"][:128])
            status, fields, wait = 500, {"message": text, "type": "InternalError"}, 1.0
            release(error)
        if started:  # the connection is closed in the middle of the answer, which no client takes for a whole one
            return
        headers = [CLOSE]  # what is left of the body is not read
        if status == 503:
            headers.append((b"retry-after", str(max(1, math.ceil(wait))).encode()))
        if status == 401:
            headers.append((b"www-authenticate", b'Bearer, Basic realm="opd"'))
        await _answer(send, status, {"error": fields | {"param": None, "code": status}}, headers)

    async def _health(self, request: Request, caller: Caller, send: Send) -> None:
        if not self._serving():
            raise UnavailableError("no teacher is ready, or the server is shutting down; ask another replica.")
        await _answer(send, 200, {})

    async def _models(self, request: Request, caller: Caller, send: Send) -> None:
        await _answer(
            send, 200, {"object": "list", "data": [self._model(t) for t in self._shared.teachers if t.worker]}
        )

    def _model(self, teacher: Any) -> dict[str, Any]:
        info, bounds = teacher.info, teacher.bounds
        own = {"weights_hash": info.weights_hash, "tokenizer_fingerprint": info.tokenizer.fingerprint}
        own |= {"chat_template_hash": info.tokenizer.chat_template_hash, "vocab_size": info.vocab_size}
        own |= {"max_k": bounds.max_k, "payloads": sorted(bounds.payloads), "engine": info.engine}
        known = {"id": teacher.name, "object": "model", "created": self._created, "owned_by": "opd", "parent": None}
        return known | {"root": info.model, "max_model_len": bounds.max_sequence_tokens, "permission": [], "opd": own}

    def _scores(self, ask: Ask) -> Handler:
        async def handle(request: Request, caller: Caller, send: Send) -> None:
            arrived = time.monotonic()
            question = await self._receiver.read(
                caller,
                lambda: read_body(request, self._shared.settings.limits.max_request_bytes),
                lambda body: self._question(ask, body, request),
            )
            call = BodyCall(self._shared, question, send, principal=caller.key, seconds_left=None, arrived=arrived)
            del question
            await _serve_unless_left(self._shared, call, request)

        return handle

    def _question(self, ask: Ask, body: bytes, request: Request) -> Question:
        limits = self._shared.settings.limits
        fields = parse_body(body, limits.max_request_tokens)
        name = fields.get("model") or request.query_params.get("model") or self._only_teacher()
        if not isinstance(name, str):
            raise InvalidRequestError("model must be the name of a teacher; GET /v1/models lists them.")
        return ask(fields, name, self._shared.teachers.get(name).bounds)

    def _only_teacher(self) -> str:
        names = [teacher.name for teacher in self._shared.teachers]
        if len(names) != 1:
            raise InvalidRequestError(
                f"this server has {len(names)} teachers; name one in the field model, or as ?model=NAME in the address."
            )
        return names[0]


class _Endpoint:
    """A route, as an ASGI app."""

    def __init__(self, door: Door, scope_name: str, handler: Handler) -> None:
        self._door, self._scope_name, self._handler = door, scope_name, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door.call(self._scope_name, self._handler, Request(scope, receive), send)


async def _serve_unless_left(shared: Shared, call: BodyCall, request: Request) -> None:
    """Run a call, but stop if the client leaves before it has its answer."""
    task, left = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal left
        await request.receive()  # nothing else is to come: it returns when the client has left, or has its answer
        if task is not None and not call.answered:
            left = True
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        await serve(shared, call, _metadata(request))
    except asyncio.CancelledError:
        if left and task is not None and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


async def _answer(
    send: Send, status: int, body: dict[str, Any], headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    data = json.dumps(body).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": data})


def _error(error: OpdError) -> dict[str, Any]:
    return {"message": str(error), "type": type(error).__name__}


def _address(request: Request) -> str:
    host = request.client.host if request.client else ""
    return peer_address(f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0")


def _metadata(request: Request) -> list[tuple[str, str]]:
    """The headers, with the password of Basic authentication as a bearer token."""
    return [(name, _as_bearer(value) if name == "authorization" else value) for name, value in request.headers.items()]


def _as_bearer(value: str) -> str:
    kind, _, given = value.partition(" ")
    if kind.lower() != "basic":
        return value
    try:
        return f"Bearer {base64.b64decode(given.strip(), validate=True).decode().partition(':')[2]}"
    except ValueError:
        raise AuthError(
            "the authorization header must be 'Bearer TOKEN', or Basic with the token as password."
        ) from None
