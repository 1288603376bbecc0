"""OpenEnv both ways: our environments as its servers, and its servers as our environments."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
from ports import held_port
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.sync.server import serve

from opd.config import parse_settings
from opd.errors import ConfigError, DataError, PortInUseError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.environments.openenv import OpenEnv, OpenEnvOptions
from opd.tasks.environments.openenv_server import Session, serve_environment
from opd.tasks.environments.pool import EpisodeError
from opd.tasks.environments.worlds import InProcess
from opd.tasks.prompt import Prompt

SPEC = {"name": "lock", "options": {"digits": 3, "turns": 5}}
TEXT = {"action": "message", "observation": "text"}
PROMPT = Prompt.make("Open it.")


@pytest.fixture
def lock_server() -> Iterator[str]:
    """The lock, served to two sessions at a time."""
    with served(2) as address:
        yield address


@contextmanager
def served(sessions: int, **limits: Any) -> Iterator[str]:
    """The lock, served to so many sessions at a time."""
    started: list[tuple[Any, int]] = []
    ready = threading.Event()

    def tell(server: Any, port: int) -> None:
        started.append((server, port))
        ready.set()

    thread = threading.Thread(target=serve_environment, args=(SPEC, "127.0.0.1", 0, sessions, tell), kwargs=limits)
    thread.start()
    ready.wait()
    try:
        yield f"ws://127.0.0.1:{started[0][1]}/ws"
    finally:
        started[0][0].shutdown()
        thread.join()


@contextmanager
def answering(play: Callable[[Any], object]) -> Iterator[str]:
    """A WebSocket server that plays each connection as told."""
    with serve(play, "127.0.0.1", 0) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()


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


@pytest.mark.filterwarnings("error::DeprecationWarning")
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
    with pytest.raises(PortInUseError, match=rf"listen on 127\.0\.0\.1:{port}: "):
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


def test_a_web_page_cannot_play(lock_server: str) -> None:
    for origin, headers in (("http://evil.example", {}), (None, {"Host": "evil.example:8000"})):
        with pytest.raises(InvalidStatus, match="403"):
            connect(lock_server, proxy=None, origin=origin, additional_headers=headers)  # type: ignore[arg-type]
    with connect(lock_server, proxy=None, additional_headers={"Host": "localhost:80"}) as session:
        session.send('{"type": "state"}')
        assert json.loads(session.recv())["type"] == "state"


def test_origins_and_hosts_that_are_named_may_play() -> None:
    with served(2, origins=["https://play.example"], hosts=["play.example"]) as address:
        connect(address, proxy=None, origin="https://play.example", additional_headers={"Host": "play.example"}).close()  # type: ignore[arg-type]


def test_sessions_that_are_idle_end_and_free_their_places() -> None:
    with served(2, idle_seconds=1.0) as address:
        for session in [connect(address, proxy=None) for _ in range(2)]:
            with pytest.raises(ConnectionClosed, match="nothing was sent"):
                session.recv()
        env = client(address, **TEXT)
        env.reset(PROMPT, 0)
        assert env._session is not None
        with pytest.raises(ConnectionClosed):
            env._session.recv()
        assert env.reset(PROMPT, 1).text != ""  # by another session
        env.close()


@pytest.mark.parametrize("frame", ["[" * 100_000, '{"type":' * 100_000, "[NaN]", b"\xff"])
def test_a_frame_that_cannot_be_read_is_answered(lock_server: str, frame: str | bytes) -> None:
    with connect(lock_server, proxy=None) as session:
        session.send(frame)
        assert json.loads(session.recv())["data"]["code"] == "INVALID_JSON"
        session.send(json.dumps({"type": "reset", "data": {"seed": 1, "episode_id": [[]]}}))
        assert json.loads(session.recv())["data"]["code"] == "VALIDATION_ERROR"


def test_a_frame_that_nothing_asked_for_ends_the_session_and_not_the_next_one() -> None:
    """Frames have no ids: it would be taken for the next answer, and every later answer for the one after."""
    sent = threading.Event()

    def play(connection: Any) -> None:
        for _ in connection:
            connection.send(json.dumps(observed(text="asked")))
            connection.send(json.dumps(observed(text="unasked")))
            sent.set()

    with answering(play) as url:
        env = client(url, **TEXT)
        for seed in range(2):
            assert env.reset(PROMPT, seed).text == "asked"
            assert sent.wait(60)
            env._session.ping().wait(60)  # its answer comes after the frame
            sent.clear()
            with pytest.raises(DataError, match="nothing asked for"):
                env.step("1")
        env.close()


@pytest.mark.parametrize(
    "frame",
    [
        "[" * 100_000,
        "null",
        "[]",
        '{"type": "observation", "data": []}',
        '{"type": "error", "data": "no"}',
        json.dumps(observed("much", text="x")),  # type: ignore[arg-type]
        json.dumps(observed(text="x")).replace("null", "NaN"),
    ],
)
def test_an_answer_that_is_not_understood_ends_the_session(frame: str) -> None:
    with answering(lambda connection: [connection.send(frame) for _ in connection]) as url:
        env = client(url, **TEXT)
        with pytest.raises(DataError):
            env.reset(PROMPT, 0)
        assert env._session is None


def test_a_server_that_says_nothing_is_given_up() -> None:
    with answering(lambda connection: [None for _ in connection]) as url:
        env = client(url, **TEXT, answer_seconds=0.1)
        with pytest.raises(DataError, match=r"within 0\.1 s"):
            env.reset(PROMPT, 0)


@pytest.mark.parametrize(
    ("message", "kind"),
    [(observed(1e308, text="x"), "invalid"), ({"type": "error", "data": {"message": "x" * 10**5}}, "raised")],
)
def test_a_reward_or_a_reason_without_bounds_breaks_one_episode_in_few_words(message: Any, kind: str) -> None:
    with answering(lambda connection: [connection.send(json.dumps(message)) for _ in connection]) as url:
        world = InProcess({"name": "openenv", "options": {"url": url, **TEXT}})
        broken = world.reset({0: (PROMPT, 0)})[0]
        world.close()
    assert isinstance(broken, EpisodeError) and broken.kind == kind and len(broken.reason) <= 500
