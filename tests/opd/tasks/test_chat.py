"""The chat client and the rewards that ask it, against a real HTTP server that also fails on purpose."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import WIRES, Liar, Wire, lying, said, whole
from judge_servers import Server, serving
from rows import make_row

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks import chat
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from student.rl import REWARDS


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(chat, "_PAUSE_SECONDS", 0.0)
    with serving() as made:
        yield made


def client(server: Server, **settings: Any) -> ChatClient:
    return ChatClient(parse_settings(ChatSettings, {"endpoint": f"{server.url}/v1/", "model": "m", **settings}))


QUESTION = [{"role": "user", "content": "how good?"}]


def test_it_asks_as_such_services_are_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    assert client(server, key_variable="A_KEY", max_tokens=5).ask(QUESTION) == "7"
    ((path, body, key),) = server.asked
    assert path == "/v1/chat/completions" and key == "Bearer secret"
    assert body == {"model": "m", "messages": QUESTION, "temperature": 0.0, "max_tokens": 5}


def test_an_answer_that_cannot_be_kept_is_an_answer_all_the_same(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    one = client(server, cache=str(tmp_path / "cache"))
    assert one.ask(QUESTION) == "7" and one.ask(QUESTION) == "7" and one.ask([{"role": "user", "content": "?"}])
    assert one.asked == 3 and len(server.asked) == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be stored in" in warning and str(tmp_path / "cache") in warning


def test_equal_questions_are_asked_once_also_by_another_run(server: Server, tmp_path: Path) -> None:
    one = client(server, cache=str(tmp_path))
    assert [one.ask(QUESTION) for _ in range(3)] == ["7"] * 3 and one.asked == 3 and len(server.asked) == 1
    other = client(server, cache=str(tmp_path))
    assert other.ask(QUESTION) == "7" and other.asked == 1 and len(server.asked) == 1
    assert client(server, cache=str(tmp_path), temperature=0.5).ask(QUESTION) == "7" and len(server.asked) == 2
    (file,) = [path for path in tmp_path.rglob("*.json") if "0.5" not in path.read_text()][:1]
    file.write_text("{half")
    assert client(server, cache=str(tmp_path)).ask(QUESTION) == "7"


@pytest.mark.parametrize(
    ("say", "calls"), [(500, 2), (429, 2), (404, 1), ("not json", 2), ("[" * 100_000, 2), ({"choices": []}, 2)]
)
def test_a_failure_is_told_and_not_kept(server: Server, say: Any, calls: int) -> None:
    server.say = lambda path, body: say
    made = client(server)
    with pytest.raises(ChatFailed, match=r"127\.0\.0\.1"):
        made.ask(QUESTION)
    assert len(server.asked) == calls
    server.say = lambda path, body: {"choices": [{"message": {"content": "now"}}]}
    assert made.ask(QUESTION) == "now"


def test_an_answer_that_breaks_the_protocol_is_a_failure_too(server: Server) -> None:
    server.says_raw = b"nonsense\r\n\r\n"
    made = client(server)
    with pytest.raises(ChatFailed, match="RemoteProtocolError"):
        made.ask(QUESTION)
    assert len(server.asked) == 2
    server.says_raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"  # cut off in mid answer
    with pytest.raises(ChatFailed, match="RemoteProtocolError"):
        made.ask(QUESTION)


@pytest.mark.parametrize("lie", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("name", ["judge", "http_judge"])
def test_a_judge_that_lies_is_unknown_in_time_and_nothing_of_it_is_kept(name: str, lie: Wire, tmp_path: Path) -> None:
    with lying(lie) as liar:
        made = reward(liar, name, timeout=0.3, attempts=1, cache=str(tmp_path))
        with pytest.raises(ChatFailed, match=r"127\.0\.0\.1"):
            made.value(PROMPT, "2")
        assert not list(tmp_path.rglob("*.json"))
        answer = {"choices": [{"message": {"content": "10"}}], "score": 1}
        liar.lie = said(answer)
        made.client.settings = made.client.settings.model_copy(update={"timeout": 60.0})
        assert made.value(PROMPT, "2") == 1.0
        liar.lie = said({**answer, "error": "overloaded"})
        with pytest.raises(ChatFailed):
            made.value(PROMPT, "3")


def test_a_key_does_not_follow_a_redirect(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    for status in ("302 Found", "307 Temporary Redirect"):
        with lying(whole("", status, f"Location: {server.url}/v1/chat/completions")) as liar:
            asked = {"endpoint": liar.url, "model": "m", "key_variable": "A_KEY", "attempts": 1}
            with pytest.raises(ChatFailed, match="status 30"):
                ChatClient(parse_settings(ChatSettings, asked)).ask(QUESTION)
    assert server.asked == []


def test_only_what_is_used_of_an_answer_is_kept(server: Server, tmp_path: Path) -> None:
    server.say = lambda path, body: {"choices": [{"message": {"content": "7"}}], "usage": "x" * 100_000, "score": 7}
    for name in ("judge", "http_judge"):
        reward(server, name, cache=str(tmp_path)).value(PROMPT, "2")
    files = list(tmp_path.rglob("*.json"))
    assert len(files) == 2 and all(file.stat().st_size < 100 for file in files)


def test_a_text_that_is_longer_than_was_asked_for_is_a_failure(server: Server) -> None:
    server.say = lambda path, body: {"choices": [{"message": {"content": "7" * 10_000}}]}
    with pytest.raises(ChatFailed, match="10000 characters, too many for max_tokens"):
        client(server, max_tokens=9).ask(QUESTION)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"score": NaN}', "null", '{"error": "x"}'], ids=["deep", "NaN", "null", "error"]
)
def test_a_file_of_the_cache_that_holds_no_answer_is_asked_about_again(
    server: Server, tmp_path: Path, text: str
) -> None:
    server.say = lambda path, body: {"score": 0.5}
    reward(server, "http_judge", cache=str(tmp_path)).value(PROMPT, "2")
    (file,) = tmp_path.rglob("*.json")
    file.write_text(text)
    assert reward(server, "http_judge", cache=str(tmp_path)).value(PROMPT, "2") == 0.5 and len(server.asked) == 2


def test_a_service_that_hangs_or_is_away_is_given_up(server: Server) -> None:
    server.say = lambda path, body: None
    with pytest.raises(ChatFailed):
        client(server, timeout=0.2, attempts=1).ask(QUESTION)
    away = parse_settings(ChatSettings, {"endpoint": "http://127.0.0.1:1", "model": "m"})
    with pytest.raises(ChatFailed, match="refused"):
        ChatClient(away).ask(QUESTION)


def reward(server: Server | Liar, name: str, **settings: Any) -> Any:
    cls = REWARDS.load(name)
    model = {} if name == "http_judge" else {"model": "m"}
    return cls(parse_settings(cls.settings_type, {"name": name, "endpoint": server.url, **model, **settings}))


PROMPT = Prompt.make("1+1=", answer="2", extra={"constraints": ["short", "polite", "right", "in verse"]})


def test_a_judge_grades_and_what_it_does_not_say_is_unknown(server: Server) -> None:
    words = ["It is good. Grade: 8", "no idea", "12", "-3", "8/10", "I give it 6.5 out of 10.", "between 3-4"]
    words += ["**8**/10", r"$\boxed{8}/10$", "7 (out of 10)"]
    texts = iter(words)
    server.say = lambda path, body: {"choices": [{"message": {"content": next(texts)}}]}
    made = reward(server, "judge")
    wanted = [0.8, None, 1.0, 0.0, 0.8, 0.65, 0.4, 0.8, 0.8, 0.7]
    assert [made.value(PROMPT, f"answer {i} {{reference}}") for i in range(len(words))] == wanted
    asked = server.asked[0][1]["messages"][0]["content"]
    assert "1+1=" in asked and "answer 0 {reference}" in asked and "Reference:\n2" in asked


def test_a_judge_that_is_down_leaves_rows_unknown_and_counts_them(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.say = lambda path, body: 500

    for name in ("judge", "http_judge", "checklist"):
        made, rows = reward(server, name), [make_row(prompt=PROMPT, text="2", reward=0.0) for _ in range(2)]
        made.reward(rows, None)
        assert [row.reward for row in rows] == [None, None] and made.fired["unknown"] == (2.0, 2.0)
    for name in ("judge", "http_judge", "checklist"):  # why is said, once by each
        assert caplog.text.count(f"reward {name} is unknown for an answer: http://127.0.0.1") == 1
    assert "counted in the metric judge/unknown" in caplog.text


def test_any_service_can_score(server: Server) -> None:
    scores = {"bad": -1.5, "odd": None, "endless": 10**400, "text": "1"}
    server.say = lambda path, body: {"score": scores[body["answer"]]}
    made = reward(server, "http_judge", path="/score")
    assert [made.value(PROMPT, answer) for answer in scores] == [-1.5, None, None, None]
    assert server.asked[0][:2] == ("/score", {"prompt": "1+1=", "answer": "bad", "reference": "2"})


def test_a_checklist_is_the_mean_over_what_the_judge_tells(server: Server) -> None:
    def say(path: str, body: Any) -> Any:
        text = body["messages"][0]["content"]
        words = {"short": "Yes.", "polite": "partly", "right": "No", "in verse": "hm"}
        return {"choices": [{"message": {"content": next(w for c, w in words.items() if f"this: {c}" in text)}}]}

    server.say = say
    made = reward(server, "checklist")
    assert made.value(PROMPT, "2") == pytest.approx(0.5)
    with pytest.raises(DataError, match="keep_columns"):
        made.value(Prompt.make("q"), "2")
    server.say = lambda path, body: 500 if "verse" in asked(body) else say(path, body)
    with pytest.raises(ChatFailed):  # and not a mean over the constraints that it happened to answer
        made.value(PROMPT, "3")


def test_appeals_note_what_a_judge_says_of_refused_answers_and_change_no_reward(server: Server) -> None:
    words = {"2.0": "They agree: yes", "3": "No.", "?": "hm"}
    server.say = lambda path, body: {
        "choices": [{"message": {"content": next(w for a, w in words.items() if f"Answer:\n{a}\n" in asked(body))}}]
    }

    answers = [("2.0", 0.0), ("3", 0.0), ("?", 0.0), ("2", 1.0)]
    rows = [make_row(prompt=PROMPT, text=text, verdict=Verdict.score(value)) for text, value in answers]
    made = reward(server, "appeals", share=1.0)
    made.reward(rows, None)
    assert [row.notes.get("appeals/overturned") for row in rows] == [1.0, 0.0, None, None]
    assert made.fired == {"unknown": (1.0, 3.0), "overturned": (1.0, 2.0)}
    assert not any(row.reward_parts for row in rows) and len(server.asked) == 3


def asked(body: Any) -> str:
    return str(body["messages"][0]["content"])
