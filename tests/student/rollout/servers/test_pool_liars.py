"""Rollout servers that lie about themselves, when the run begins or later: the others are used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import ENDLESS, ONE_OF_EACH, SLOW, WIRES, Liar, Wire, lying, said
from server_engines import engine_on, sync
from sglang_rollouts import SglangRollouts
from slow_cases import slow

from opd.errors import ConfigError, RolloutEngineError
from student.rollout.servers.dialect import Dialect
from student.rollout.servers.engine import ServersEngine
from student.rollout.servers.http import Connection
from student.rollout.servers.pool import Pool
from student.rollout.servers.server import Server
from student.rollout.servers.settings import ServersSettings
from student.rollout.servers.sglang import SglangDialect
from student.rollout.servers.vllm import VllmDialect

FACTS = said({"max_req_input_len": 500})


def of_vllm(**other: Any) -> Wire:
    """What a vLLM server reports, that has the flags unless they are given."""
    model = {"max_model_len": 500, "max_logprobs": 20, "logprobs_mode": "processed_logprobs"} | other
    return said({"vllm_config": {"model_config": model}})


Open = Callable[..., Pool]
ENDS_NEVER = [*SLOW.values(), *ENDLESS.values()]


@pytest.fixture(scope="module")
def engine(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServersEngine]:
    """An engine whose weights a good server holds."""
    server = SglangRollouts(world / "student")
    made = engine_on((server,), world / "student", tmp_path_factory.mktemp("weights"))
    sync(made)
    yield made
    made.close()
    server.close()


@pytest.fixture
def open_pool(engine: ServersEngine, liar: Liar, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a pool of servers, which waits 0.3 s for an answer that never ends, and a minute for any other."""
    connect = Server.connect

    def without_patience(server: Server, seconds: float | None = None, **which: bool) -> Connection:
        never = server.url == liar.url and liar.lie in ENDS_NEVER
        return connect(server, 0.3 if never else seconds, **which)

    monkeypatch.setattr(Server, "connect", without_patience)

    def make(*urls: str, dialect: type[Dialect] = SglangDialect) -> Pool:
        settings = ServersSettings(name="sglang_server", endpoints=[*urls], patience_seconds=0.0)
        asked: Any = engine._pool
        unchanged: Any = {"adapters": False, "lock": asked._lock, "ask": asked._ask, "count": lambda *_: None}
        return Pool(settings, dialect, engine.setup, **unchanged)

    return make


@pytest.fixture
def liar() -> Iterator[Liar]:
    with lying(FACTS) as made:
        yield made


def lost(pool: Pool) -> list[bool]:
    return [server.lost != "" for server in pool.servers]


@pytest.mark.parametrize("lie", WIRES.values(), ids=WIRES)
def test_a_server_that_lies_from_the_beginning_costs_nothing_beside_another(
    engine: ServersEngine, open_pool: Open, liar: Liar, lie: Wire
) -> None:
    liar.lie, good = lie, engine._pool.servers[0].url
    pool = open_pool(good, liar.url)
    pool.spread(engine._weights)
    assert lost(pool) == [False, True]
    with pytest.raises((RolloutEngineError, ConfigError), match=liar.url):
        open_pool(liar.url).spread(engine._weights)


@pytest.mark.parametrize("lie", [*ONE_OF_EACH, *slow(*(name for name in WIRES if name not in ONE_OF_EACH))])
def test_a_server_that_lies_at_a_sync_costs_nothing_beside_another(
    engine: ServersEngine, open_pool: Open, liar: Liar, lie: str
) -> None:
    pool = open_pool(engine._pool.servers[0].url, liar.url)
    liar.lie = WIRES[lie]
    pool.spread(engine._weights)
    assert lost(pool) == [False, True]
    pool.servers.pop(0)
    with pytest.raises(RolloutEngineError, match=liar.url):
        pool.spread(engine._weights)


@pytest.mark.parametrize(
    ("lie", "fix"),
    [
        (WIRES["answers 404 Not Found"], "VLLM_SERVER_DEV_MODE=1"),
        (of_vllm(logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_lacks_a_flag_costs_nothing_beside_another(
    open_pool: Open, liar: Liar, lie: Wire, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    liar.lie = lie
    with lying(of_vllm()) as good:
        assert lost(open_pool(liar.url, good.url, dialect=VllmDialect)) == [True, False]
    assert liar.url in caplog.text and fix in caplog.text
    with pytest.raises(ConfigError, match=fix):
        open_pool(liar.url, dialect=VllmDialect)
