"""Rollout servers that lie: beside a good server they cost nothing, and alone they end the run with their reason.

A lie is a line of `hostile.WIRES`, or of one of the tables below for rows of the right form.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hostile import ONE_OF_EACH, WIRES, said, whole
from server_engines import engine_on, ids, sync
from sglang_rollouts import SglangRollouts
from slow_cases import slow

from opd.errors import RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.rollout.servers import engine as engine_module
from student.rollout.servers.answer_check import problem_of
from student.rollout.servers.crowd import Crowd
from student.rollout.servers.dialect import Answer, Ask
from student.rollout.servers.engine import ServersEngine
from student.rollout.servers.http import LostError
from student.rollout.servers.server import Server
from student.rollout.servers.settings import ServersSettings
from student.rollout.servers.vllm import VllmDialect

PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(2)]
Lie = Callable[[Any, Any], None]


def plan() -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=1, max_new_tokens=6, temperature=1.0).rows


def changed(path: str, value: object) -> Lie:
    """The true answer with one value replaced, or removed for `...`; written as Python writes it, NaN included."""

    def lie(connection: Any, true: Any) -> None:
        *way, last = path.split("/")
        at = true = json.loads(json.dumps(true))
        for name in way:
            at = at[int(name) if isinstance(at, list) else name]
        key = int(last) if isinstance(at, list) else last
        if value is ...:
            del at[key]
        else:
            at[key] = value
        said(true)(connection)

    return lie


LOGP, TOP = "meta_info/output_token_logprobs", "meta_info/output_top_logprobs"
ROWS: dict[str, Lie] = {
    "no tokens": changed("output_ids", []),
    "tokens that are a word": changed("output_ids", "ids"),
    "a token of infinity": changed("output_ids", [float("inf")]),
    "no log-probs": changed(LOGP, ...),
    "a log-prob that is null": changed(f"{LOGP}/0/0", None),
    "a log-prob that is a word": changed(f"{LOGP}/0/0", "-1"),
    "a log-prob of NaN": changed(f"{LOGP}/0/0", float("nan")),
    "a log-prob of 1e999": lambda connection, true: whole(
        json.dumps(
            {**true, "meta_info": {**true["meta_info"], "output_token_logprobs": [["@", true["output_ids"][0]]]}}
        ).replace('"@"', "-1e999")
    )(connection),
    "log-probs of 0": lambda connection, true: said(
        {**true, "meta_info": {**true["meta_info"], "output_token_logprobs": [[0.0, i] for i in true["output_ids"]]}}
    )(connection),
    "no finish reason": changed("meta_info/finish_reason", None),
    "candidates for fewer positions": changed(f"{TOP}/0", ...),
    "too few candidates": changed(f"{TOP}/0/0", ...),
    "no candidates": changed(TOP, None),
    "weights of another name": changed("meta_info/weight_versions", [{"version": "other"}]),
    "weights that are a number": changed("meta_info/weight_versions", 5),
}
LIES = {name: (lambda connection, true, wire=wire: wire(connection)) for name, wire in WIRES.items()} | ROWS


@pytest.fixture(scope="module")
def pair(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SglangRollouts, SglangRollouts]]:
    """A good server and a liar."""
    servers = SglangRollouts(world / "student"), SglangRollouts(world / "student")
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def beside(
    pair: tuple[SglangRollouts, SglangRollouts], world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersEngine]:
    """An engine on both."""
    engine = engine_on(pair, world / "student", tmp_path_factory.mktemp("weights"), in_flight=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(
    pair: tuple[SglangRollouts, SglangRollouts], world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServersEngine]:
    """An engine on the liar."""
    engine = engine_on(pair[1:], world / "student", tmp_path_factory.mktemp("weights"), in_flight=1)
    yield engine
    engine.close()


@pytest.fixture
def liar(pair: tuple[SglangRollouts, SglangRollouts], monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangRollouts]:
    monkeypatch.setattr(engine_module, "_FRUITLESS", 1)
    connect, made = Server.connect, pair[1]

    def impatient(server: Server, seconds: float | None = None, **which: bool) -> Any:
        hasty = seconds is None and server.url == made.url and made.lie is not None
        return connect(server, 0.3 if hasty else seconds, **which)

    monkeypatch.setattr(Server, "connect", impatient)
    yield made
    made.lie = pair[0].gate = None


ENOUGH = [*ONE_OF_EACH, "no tokens", "weights of another name"]


@pytest.mark.parametrize("lie", [*ONE_OF_EACH, *ROWS, *slow(*(name for name in WIRES if name not in ONE_OF_EACH))])
def test_a_liar_is_left_for_the_others_until_the_next_sync(
    beside: ServersEngine, pair: tuple[SglangRollouts, SglangRollouts], liar: SglangRollouts, lie: str
) -> None:
    sync(beside)
    assert [server.lost for server in beside._pool.servers] == ["", ""]
    wanted = ids(beside.sample(plan()))
    liar.lied.clear()
    pair[0].gate = liar.lied  # the liar must have had a row before the other has done them all
    liar.lie = LIES[lie]
    assert ids(beside.sample(plan())) == wanted
    assert [server.lost != "" for server in beside._pool.servers] == [False, True]


@pytest.mark.parametrize("lie", [*ENOUGH, *slow(*(name for name in LIES if name not in ENOUGH))])
def test_a_liar_alone_ends_the_run_with_its_reason(alone: ServersEngine, liar: SglangRollouts, lie: str) -> None:
    sync(alone)
    liar.lie = LIES[lie]
    with pytest.raises(RolloutEngineError, match=r"all rollout servers .* (http://127|it sampled with)"):
        alone.sample(plan())


def test_a_server_that_cannot_be_used_at_the_start_is_left_out_and_comes_back(
    world: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, late = SglangRollouts(world / "student"), SglangRollouts(world / "student")
    late.gone = True
    engine = engine_on((good, late), world / "student", tmp_path)
    assert "It is left out until it can be used" in caplog.text
    sync(engine)
    assert [server.label is None for server in engine._pool.servers] == [False, True]
    late.gone, whole = False, late.model.config.max_position_embeddings
    late.model.config.max_position_embeddings = 9  # rows that the others allow would be refused
    sync(engine)
    assert "allows 3 tokens" in engine._pool.servers[1].lost
    late.model.config.max_position_embeddings = whole
    sync(engine)
    assert [server.label is None for server in engine._pool.servers] == [False, False]
    for server in (engine, good, late):
        server.close()


def test_an_error_of_our_own_in_a_thread_reaches_the_run(
    beside: ServersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OurMistake(BaseException):
        pass

    def fails(*_: object) -> Answer:
        raise OurMistake

    sync(beside)
    monkeypatch.setattr(Server, "generate", fails)
    ask = Ask([1], 3, 1.0, [], 0, 0, range(9, 9), beside._label)
    with pytest.raises(OurMistake):
        Crowd(beside._pool.holding(beside._label), [ask], 2).run(lambda *_: None)


ASK = Ask(prompt=[1], limit=4, temperature=1.0, stops=[5], seed=0, top=2, barred=range(100, 128), weights="w")
ROW = Answer(
    ids=[3, 7, 5],
    logp=[-0.1, -1.0, 0.0],
    top=[[3, 4], [7, 1], [2, 5]],
    top_logp=[[-0.1, -3.0], [-1.0, -1.0], [-9.0, 0.0]],
    weights=("w",),
)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, ""),
        ({"logp": [-0.1, -1.0, 0.0009]}, ""),  # rounding
        ({"logp": [-0.1, -1.0, -999.0], "top": [[3, 4], [7, 1], [2, 6]]}, ""),  # a token that is not a likely one
        (
            {"ids": [3, 7, 8, 9], "logp": [-1.0] * 4, "top": [[3, 4]] * 4, "top_logp": [[-1.0, -2.0]] * 4},
            "",
        ),  # ended by its limit
        ({"ids": []}, "0 tokens"),
        ({"ids": [3, 7, 8, 9, 5]}, "5 tokens, but 1 to 4"),
        ({"ids": [3, -1, 5]}, "not an id below 100"),
        ({"ids": [3, 100, 5]}, "not an id below 100"),
        ({"ids": [3, 10**9, 5]}, "not an id below 100"),
        ({"ids": [3, 2**40, 5]}, "not an id below 100"),
        ({"ids": [3, 2**63, 5]}, "not an id below 100"),
        ({"ids": [3, 10**30, 5]}, "not an id below 100"),
        ({"ids": [3, 7.0, 5]}, "not an id below 100"),
        ({"ids": [3, "7", 5]}, "not an id below 100"),
        ({"ids": [3, None, 5]}, "not an id below 100"),
        ({"ids": [[3], [7], [5]]}, "not an id below 100"),
        ({"ids": [3, [7, 1], 5]}, "not an id below 100"),
        ({"ids": [3, 5, 5]}, "continues after a stop token"),
        ({"ids": [3, 7, 8]}, "ends after 3 of 4 tokens"),
        ({"logp": [-0.1, -1.0]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, 3.0]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, -1e308]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, -9999.0]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, float("nan")]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, -float("inf")]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, None]}, "log-probs that are not one number"),
        ({"logp": [-0.1, -1.0, "-1"]}, "log-probs that are not one number"),
        ({"top": []}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7, 1]]}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7], [2, 5]]}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7, 10**7], [2, 5]]}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7, -1], [2, 5]]}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7, "1"], [2, 5]]}, "does not have 2 likely ids"),
        ({"top": [[3, 4], [7, 7], [2, 5]]}, "twice"),
        ({"top_logp": []}, "does not have a log-prob"),
        ({"top_logp": [[-0.1, -3.0], [-1.0], [-9.0, 0.0]]}, "does not have a log-prob"),
        ({"top_logp": [[-0.1, -3.0], [-1.0, None], [-9.0, 0.0]]}, "does not have a log-prob"),
        ({"top_logp": [[-0.1, -3.0], [-1.0, float("nan")], [-9.0, 0.0]]}, "does not have a log-prob"),
        ({"top_logp": [[-0.1, -3.0], [-1.0, 1.0], [-9.0, 0.0]]}, "does not have a log-prob"),
        ({"logp": [0.0] * 3}, "more than 1"),
        ({"logp": [0.0] * 3, "top_logp": [[0.0, 0.0]] * 3}, "more than 1"),
        ({"logp": [-3.0, -1.0, 0.0]}, "two log-probs"),
    ],
)
def test_a_row_is_used_where_it_can_be_the_answer_to_what_was_asked(row: dict[str, Any], said: str) -> None:
    found = problem_of(replace(ROW, **row), ASK)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"choices": []},
        {"choices": [{}, {}]},
        {"choices": [{"finish_reason": "stop", "token_ids": [5], "logprobs": None}]},
        {"choices": [{"finish_reason": "stop", "token_ids": None, "logprobs": {"content": []}}]},
        {"choices": [{"finish_reason": "stop", "token_ids": [5], "logprobs": {"content": [{"token_id": 4}]}}]},
        {"choices": [{"finish_reason": "stop", "token_ids": [5], "logprobs": {"content": [5]}}]},
    ],
)
def test_a_vllm_server_that_answers_in_another_form_is_lost(answer: Any) -> None:
    class Fixed:
        url = "http://127.0.0.1:1"

        def call(self, *_: object, **__: object) -> Any:
            return answer

    settings = ServersSettings(name="vllm_server", endpoints=[Fixed.url])
    connection: Any = Fixed()
    with pytest.raises(LostError, match="http://127"):
        Server(Fixed.url, VllmDialect(), settings, adapters=False).generate(connection, ASK)
