"""Reward grpc_judge against a real gRPC server that also fails on purpose."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from judge_servers import Judge

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks import chat
from opd.tasks.prompt import Prompt
from opd.wire.v1 import judge_pb2_grpc
from student.rl import REWARDS

PROMPT = Prompt.make("1+1=", answer="2")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setattr(chat, "_PAUSE_SECONDS", 0.0)
    server = grpc.server(ThreadPoolExecutor(2))
    made = Judge()
    judge_pb2_grpc.add_JudgeServiceServicer_to_server(made, server)
    made.port = server.add_insecure_port("127.0.0.1:0")  # type: ignore[attr-defined]
    server.start()
    yield made
    server.stop(None).wait()


def reward(judge: Judge, **settings: Any) -> Any:
    cls = REWARDS.load("grpc_judge")
    endpoint = f"127.0.0.1:{judge.port}"  # type: ignore[attr-defined]
    return cls(parse_settings(cls.settings_type, {"name": "grpc_judge", "endpoint": endpoint, **settings}))


def rows(*texts: str) -> list[Any]:
    return [SimpleNamespace(prompt=PROMPT, text=text, reward=9.0, reward_parts={}) for text in texts]


def test_a_judge_scores_and_what_it_cannot_tell_is_unknown(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    scores = {"good": 1.5, "bad": -1.0, "odd": None, "wild": float("nan")}
    judge.say = lambda request: scores[request.answer]
    made, answers = reward(judge, weight=2.0, security={"token_env": "A_TOKEN"}), rows(*scores)
    made.reward(answers, None)
    assert [row.reward for row in answers] == [3.0, -2.0, None, None]
    assert made.fired["unknown"] == (2.0, 4.0)
    request, metadata = judge.asked[0]
    assert (request.prompt, request.reference) == ("1+1=", "2") and metadata["authorization"] == "Bearer secret"
    made.reward(rows(*scores), None)
    assert len(judge.asked) == 4  # equal answers are asked about once
    made.close()


@pytest.mark.parametrize(
    ("status", "calls"),
    [
        (grpc.StatusCode.UNAVAILABLE, 3),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 3),
        (grpc.StatusCode.UNKNOWN, 3),
        (grpc.StatusCode.INVALID_ARGUMENT, 1),
    ],
)
def test_a_judge_that_fails_leaves_rows_unknown_and_is_asked_again_where_that_may_help(
    judge: Judge, status: grpc.StatusCode, calls: int
) -> None:
    judge.say = lambda request: status
    made, answers = reward(judge, attempts=3), rows("2")
    made.reward(answers, None)
    assert answers[0].reward is None and len(judge.asked) == calls and made.fired["unknown"] == (1.0, 1.0)
    judge.say = lambda request: 1.0
    made.reward(answers, None)
    assert answers[0].reward == 1.0  # a failure is not kept
    made.close()


def test_a_judge_that_is_away_leaves_rows_unknown(tmp_path: Path) -> None:
    cls = REWARDS.load("grpc_judge")
    made = cls(parse_settings(cls.settings_type, {"name": "g", "endpoint": f"unix:{tmp_path / 's'}", "attempts": 1}))
    answers = rows("2")
    made.reward(answers, None)
    assert answers[0].reward is None
    made.close()


def test_a_token_does_not_leave_the_host_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    cls = REWARDS.load("grpc_judge")
    entry = {"name": "g", "endpoint": "judge.example:7080", "security": {"token_env": "A_TOKEN"}}
    with pytest.raises(ConfigError, match="sent unencrypted"):
        cls(parse_settings(cls.settings_type, entry)).value(PROMPT, "2")
