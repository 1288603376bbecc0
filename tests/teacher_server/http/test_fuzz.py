"""Hostile requests at the HTTP door: none crashes the server, ends in 500, or leaves something behind.

`make fuzz` runs at least 10,000 cases (OPD_FUZZ_CASES); the suite runs a few dozen.
"""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from teacher_server.server import TeacherServer
from teacher_server.settings import ServerSettings

CASES = int(os.environ.get("OPD_FUZZ_CASES", "60"))
FUZZ = settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
ALLOWED = {200, 400, 404}
PATHS = ("/v1/completions", "/inference/v1/generate", "/generate")

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.just(10**400),
)
anything = st.recursive(odd, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner))
ids = st.lists(st.integers(0, 96), min_size=2, max_size=9)
near_ids = st.lists(st.one_of(st.integers(-2, 98), odd), max_size=9)
rows = st.lists(st.one_of(st.lists(st.integers(-1, 96), max_size=4), near_ids), max_size=9)
small = st.integers(-2, 9)
extras = st.fixed_dictionaries(
    {}, optional={"temperature": st.one_of(st.floats(0.5, 2), odd), "log_tail": st.booleans() | odd}
)


def either(likely: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(likely, likely, likely, anything)


sampling = st.fixed_dictionaries(
    {"max_tokens": either(st.just(1)), "max_new_tokens": either(st.just(0))},
    optional={
        "temperature": either(st.sampled_from([0, 1, 1.0, 0.7])),
        "prompt_logprobs": either(small),
        "prompt_logprob_token_ids": either(rows),
        "prompt_logprob_start": either(small),
        "n": either(st.just(1)),
    },
)
bodies = st.fixed_dictionaries(
    {
        "model": either(st.just("t")),
        "prompt": either(ids | st.lists(ids, max_size=7)),
        "token_ids": either(ids),
        "input_ids": either(ids | st.lists(ids, max_size=7)),
        "max_tokens": either(st.just(1)),
        "return_logprob": either(st.just(True)),
        "sampling_params": either(sampling),
        "logprob_start_len": either(small),
    },
    optional={
        "prompt_logprobs": either(small),
        "temperature": either(st.sampled_from([0, 1, 0.7])),
        "top_logprobs_num": either(small),
        "token_ids_logprob": either(st.lists(st.integers(0, 96), max_size=4)),
        "token_ids_logprob_positions": either(rows | st.lists(rows, max_size=4)),
        "return_flat_raw_top_logprobs": st.booleans(),
        "return_flat_raw_top_logprobs_b64": st.booleans(),
        "rid": either(st.text(max_size=9)),
        "opd": either(extras),
        "stream": either(st.just(False)),
    },
)


@pytest.fixture(scope="module")
def live(numpy_engine: Any) -> Iterator[Any]:
    """A server on a loop of its own."""
    engine = numpy_engine()
    limits = {"max_sequence_tokens": 64, "max_request_bytes": 20_000, "max_sequences": 5}
    made = ServerSettings(metrics_port=-1, limits=limits, log={"level": "error"}, http={"port": 0})
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def start() -> TeacherServer:
        server = TeacherServer(made, lambda model: engine)
        await server.start({"t": "numpy"})
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
    yield server
    budget = server.shared.budget
    wait_until(lambda: budget.opened == budget.closed)
    assert (budget.used.tokens, budget.used.reply_bytes) == (0, 0)
    assert server.shared.metrics.unexpected_errors._value.get() == 0
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(120)
    loop.call_soon_threadsafe(loop.stop)


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as one:
        yield one


def finite(constant: str) -> None:
    raise AssertionError(f"{constant} in an answer")


@FUZZ
@given(path=st.sampled_from(PATHS), body=bodies)
def test_no_request_breaks_the_server(live: TeacherServer, session: requests.Session, path: str, body: Any) -> None:
    answer = session.post(f"http://127.0.0.1:{live.http_port}{path}", data=json.dumps(body), timeout=120)
    assert answer.status_code in ALLOWED, answer.text
    json.loads(answer.content, parse_constant=finite)


@FUZZ
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=200) | st.text('[]{}",:1eN ', max_size=300).map(str.encode))
def test_no_bytes_break_the_server(live: TeacherServer, session: requests.Session, path: str, body: bytes) -> None:
    answer = session.post(f"http://127.0.0.1:{live.http_port}{path}", data=body, timeout=120)
    assert answer.status_code == 400, answer.text
