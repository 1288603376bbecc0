"""The calls of a vLLM server, without a server."""

from types import SimpleNamespace
from typing import Any

import pytest

from student.rollout.servers import vllm
from student.rollout.servers.dialect import Ask
from student.rollout.servers.http import RefusedError

ASK = Ask([5, 6], 4, 1.0, [7], 0, 0, range(0), "w")
ROW = {
    "choices": [
        {
            "finish_reason": "stop",
            "token_ids": [7],
            "logprobs": {"content": [{"token_id": 7, "logprob": -0.5, "top_logprobs": []}]},
            "weight_versions": [{"version": "w"}],
        }
    ]
}
PAUSED = '{"error": {"message": "the engine is paused", "type": "engine_paused", "code": 503}}'


def server(replies: list[Any], seconds: float = 60.0) -> Any:
    def call(path: str, body: Any, *, most_bytes: int) -> Any:
        found = replies.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(url="http://a", seconds=seconds, call=call)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_PAUSED_SECONDS", 0.0)


def test_a_row_that_meets_a_pause_is_asked_again_until_the_server_goes_on() -> None:
    replies = [RefusedError(PAUSED, 503), RefusedError(PAUSED, 503), ROW]
    assert vllm.VllmDialect().generate(server(replies), ASK, adapters=False).ids == [7]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(RefusedError(PAUSED, 503), 0.0), (RefusedError("overloaded", 503), 60.0), (RefusedError(PAUSED, 500), 60.0)],
)
def test_another_error_and_a_pause_without_end_are_not_waited_for(error: RefusedError, seconds: float) -> None:
    with pytest.raises(RefusedError):
        vllm.VllmDialect().generate(server([error, ROW], seconds), ASK, adapters=False)
