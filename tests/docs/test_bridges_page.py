"""The requests on the page of bridges are answered, and what it says of them is true."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import requests

from teacher_server.http.door import Door
from teacher_server.settings import ServerSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bridges.md").read_text()
REQUESTS = re.findall(r"curl -s http://127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'\n", PAGE, re.DOTALL)


def test_the_page_has_a_request_for_each_kind_of_route() -> None:
    assert [path for path, _ in REQUESTS] == ["/v1/completions", "/inference/v1/generate", "/generate"]


def test_the_page_names_every_route() -> None:
    routes = {route.path for route in Door(*[None] * 4).app.routes}  # type: ignore[arg-type]
    assert all(f"`{path}`" in PAGE or f" {path}`" in PAGE for path in routes)


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
async def test_a_request_of_the_page_is_answered(path: str, body: str, numpy_server: Any) -> None:
    answer = await asyncio.to_thread(requests.post, f"{numpy_server}{path}", json=json.loads(body), timeout=120)
    assert answer.status_code == 200, answer.text


@pytest.fixture
async def numpy_server() -> Any:
    """The address of the door of a server with teacher "teacher"."""
    from constant_engine import ConstantEngine

    from teacher_server.server import TeacherServer

    settings = ServerSettings(metrics_port=-1, http={"port": 0}, log={"level": "error"})
    server = TeacherServer(settings, ConstantEngine)
    await server.start({"teacher": "constant"})
    yield f"http://127.0.0.1:{server.http_port}"
    await server.close()
