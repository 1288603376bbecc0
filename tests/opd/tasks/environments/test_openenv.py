"""OpenEnv both ways: our environments as its servers, and its servers as our environments."""

import json
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from ports import held_port
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.sync.server import serve

from opd.config import parse_settings
from opd.errors import ConfigError, DataError, PortInUseError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.environments.openenv import OpenEnv, OpenEnvOptions
from opd.tasks.environments.openenv_server import Session, serve_environment
from opd.tasks.prompt import Prompt

SPEC = {"name": "lock", "options": {"digits": 3, "turns": 5}}
TEXT = {"action": "message", "observation": "text"}
PROMPT = Prompt.make("Open it.")


@pytest.fixture
def lock_server() -> Iterator[str]:
    """The lock, served to two sessions at a time."""
    started: list[tuple[Any, int]] = []
    ready = threading.Event()

    def tell(server: Any, port: int) -> None:
        started.append((server, port))
        ready.set()

    thread = threading.Thread(target=serve_environment, args=(SPEC, "127.0.0.1", 0, 2, tell))
    thread.start()
    ready.wait()
    yield f"ws://127.0.0.1:{started[0][1]}/ws"
    started[0][0].shutdown()
    thread.join()


@pytest.fixture
def replay() -> Iterator[Callable[[list[dict[str, Any]]], str]]:
    """A server that answers any frame with the next of the given ones and hangs up after the last."""
    servers: list[Any] = []

    def start(frames: list[dict[str, Any]]) -> str:
        def play(connection: Any) -> None:
            for frame, _ in zip(frames, connection, strict=False):
                connection.send(json.dumps(frame))

        server = serve(play, "127.0.0.1", 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.socket.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown()


def client(url: str, **options: Any) -> OpenEnv:
    return OpenEnv(parse_settings(OpenEnvOptions, {"url": url, **options}))


def observed(reward: float | None = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def test_a_served_lock_is_opened_over_the_wire_as_it_is_here(lock_server: str) -> None:
    prompt = Lock(LockOptions(digits=3, turns=5)).draw(Random(4))
    env = client(lock_server, **TEXT)
    seen = env.reset(PROMPT, 4)
    assert seen.text == f"{prompt.text}{prompt.extra['register']}" and not seen.done
    for action in prompt.extra["path"]:
        seen = env.step(action)
    assert (seen.done, seen.reward, seen.success) == (True, 1.0, True)
    assert env.reset(PROMPT, 5).text != ""  # the session plays the next episode
    env.close()


def test_a_port_in_use_is_named_with_what_to_do(lock_server: str) -> None:
    port = int(lock_server.split(":")[2].split("/", maxsplit=1)[0])
    with pytest.raises(PortInUseError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*choose another"):
        serve_environment(SPEC, "127.0.0.1", port, 2, lambda *_: pytest.fail("it listens"))


def test_a_server_that_is_full_says_so_and_one_that_closes_frees_its_place(lock_server: str) -> None:
    first, second, third = (client(lock_server, **TEXT) for _ in range(3))
    first.reset(PROMPT, 0)
    second.reset(PROMPT, 0)
    with pytest.raises(DataError, match="CAPACITY_REACHED"):
        third.reset(PROMPT, 0)
    for env in (first, second, third):
        env.close()


def test_frames_that_make_no_sense_leave_the_session_alive(lock_server: str) -> None:
    with connect(lock_server, proxy=None) as session:

        def ask(frame: Any) -> dict[str, Any]:
            session.send(frame if isinstance(frame, str) else json.dumps(frame))
            found: dict[str, Any] = json.loads(session.recv())["data"]
            return found

        assert ask({"type": "step", "data": {"message": "1"}})["code"] == "EXECUTION_ERROR"  # before a reset
        assert ask("not json")["code"] == "INVALID_JSON"
        assert ask({"type": "jump", "data": {}})["code"] == "UNKNOWN_TYPE"
        assert ask({"type": "step", "data": {"action": {"message": "1"}}})["code"] == "VALIDATION_ERROR"
        assert ask({"type": "step", "data": {"message": "1"}, "id": 1})["code"] == "VALIDATION_ERROR"
        assert ask({"type": "reset", "data": {"seed": "a"}})["code"] == "VALIDATION_ERROR"
        assert ask({"type": "reset", "data": {"seed": 1, "episode_id": "abc"}})["done"] is False
        assert ask({"type": "step", "data": {"message": "x"}})["reward"] is None
        assert ask({"type": "state"}) == {"episode_id": "abc", "step_count": 1}


def test_after_a_refused_reset_there_is_no_episode_to_act_in() -> None:
    session = Session({"name": "openenv", "options": {"url": f"http://127.0.0.1:{held_port()}", **TEXT}})
    refused = session.answer('{"type": "reset", "data": {"prompt": "6 * 7?"}}')
    acted = session.answer('{"type": "step", "data": {"message": "42"}}')
    session.close()
    assert refused is not None and "ConnectionRefusedError" in refused["data"]["message"]
    assert acted is not None and acted["data"]["message"] == "the episode has not begun; reset first"


def test_an_environment_without_problems_is_given_one() -> None:
    session = Session({"name": "python"})
    refused = session.answer('{"type": "reset"}')
    assert refused is not None and "give reset a prompt" in refused["data"]["message"]
    begun = session.answer('{"type": "reset", "data": {"prompt": "6 * 7?", "answer": "42"}}')
    assert begun is not None and begun["data"]["observation"]["tools"][0]["function"]["name"] == "python"
    ended = session.answer('{"type": "step", "data": {"message": "42"}}')
    assert ended is not None and ended["data"]["reward"] == 1.0 and ended["data"]["done"]
    assert session.answer('{"type": "close"}') is None
    session.close()


def test_tools_of_a_server_are_called_and_their_failures_are_heard(
    replay: Callable[[list[dict[str, Any]]], str],
) -> None:
    """With frames that a server of OpenEnv 0.10.0 sent."""
    schema = {"type": "object", "properties": {"by": {"type": "integer"}}}
    result = {"content": [{"type": "text", "text": "n=2"}], "data": "n=2", "is_error": False}
    failed = {"error_type": "tool_not_found", "message": "no such tool"}
    url = replay(
        [
            observed(text="total 0"),
            observed(tools=[{"name": "add", "description": "Adds.", "input_schema": schema}]),
            observed(tool_name="add", result=result, error=None),
            observed(tool_name="nope", result=None, error=failed),
            observed(1.0, True, tool_name="add", result={**result, "data": None}, error=None),
        ]
    )
    env = client(url, observation=None)
    seen = env.reset(PROMPT, 7)
    assert json.loads(seen.text) == {"text": "total 0"}
    assert seen.tools[0]["function"] == {"name": "add", "description": "Adds.", "parameters": schema}
    call = '<tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>'
    assert env.step(call).results == ("n=2",)
    assert json.loads(env.step(call).results[0]) == {"error": "no such tool"}
    end = env.step(f"{call}{call}")
    assert (end.results, end.done, end.reward, end.success) == (("n=2",), True, 1.0, True)


def test_an_action_that_is_refused_is_heard_and_a_server_that_dies_ends_the_episode(
    replay: Callable[[list[dict[str, Any]]], str],
) -> None:
    error = {"type": "error", "data": {"message": "thirteen", "code": "EXECUTION_ERROR"}}
    env = client(replay([observed(text="go"), error, {"type": "error", "data": {"code": "SESSION_ERROR"}}]), **TEXT)
    env.reset(PROMPT, 0)
    seen = env.step("13")
    assert seen.text == "Error: thirteen" and not seen.done
    with pytest.raises(DataError, match="SESSION_ERROR"):
        env.step("1")
    gone = client(replay([observed(text="go")]), **TEXT)
    gone.reset(PROMPT, 0)
    with pytest.raises(ConnectionClosed):
        gone.step("1")


def test_what_cannot_be_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        client("localhost:8000")
