"""A server with its HTTP door open, and a client that speaks to it as trainers do."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import requests

from opd.wire.types import PayloadSpec, ScoreItem, Scores

SEQUENCES = [[11, 2, 83, 4, 5], [4, 50, 6, 7, 8, 96], [9, 9]]


@dataclass
class Caller:
    """Sends requests to the door of one server."""

    grpc: Any
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.grpc.server.http_port}"

    async def get(self, path: str, **options: Any) -> requests.Response:
        return await asyncio.to_thread(requests.get, self.url + path, timeout=120, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        if body is not None:
            options["json"] = body
        return await asyncio.to_thread(requests.post, self.url + path, timeout=120, **options)

    async def ok(self, path: str, body: Any, **options: Any) -> Any:
        answer = await self.post(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, body: Any, **options: Any) -> str:
        """The sentence of a refusal."""
        answer = await self.post(path, body, **options)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, 400), answer.text
        return error["message"]

    async def truth(self, ids: list[int], spec: PayloadSpec, start: int = 0, **options: Any) -> Scores:
        """What the gRPC service of the same server says of all tokens behind `start`."""
        gather = options.pop("gather", None)
        item = ScoreItem(ids, start + 1, None if gather is None else np.array(gather, np.uint32))
        return (await self.grpc.score([item], spec, **options))[0]


Door = Callable[..., Awaitable[Caller]]


@pytest.fixture
def door(start: Any) -> Door:
    """`await door(**settings)` runs a server with teacher "t" and its door open."""

    async def run(*args: Any, scheme: str = "http", **settings: Any) -> Caller:
        settings.setdefault("http", {"port": 0})
        return Caller(await start(*args, **settings), scheme)

    return run


@pytest.fixture
def sequences() -> list[list[int]]:
    return [list(ids) for ids in SEQUENCES]
