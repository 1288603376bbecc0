"""Judges as verifiers, against real HTTP and gRPC servers, with TLS and a token, and away."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import self_signed
from judge_servers import Judge, Server, serving

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks import chat
from opd.tasks.build import build_prompts
from opd.tasks.settings import FileSettings
from opd.tasks.verdict import VerdictStatus
from opd.wire.v1 import judge_pb2_grpc

CORRECT, WRONG, UNKNOWN = VerdictStatus.CORRECT, VerdictStatus.WRONG, VerdictStatus.UNKNOWN
Judged = Callable[..., list[tuple[VerdictStatus, float]]]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Verdicts on answers to a prompt of a file whose recipe names a verifier with options."""
    monkeypatch.setattr(chat, "_PAUSE_SECONDS", 0.0)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n')

    def judge(verifier: str, *answers: str, **options: Any) -> list[tuple[VerdictStatus, float]]:
        settings = {"file": str(file), "heldout": 0, "verifier": verifier, "verifier_options": options}
        source = build_prompts(parse_settings(FileSettings, settings), seed=0)
        try:
            verdicts = [source.verify(source.prompts("train", 1)[0], answer) for answer in answers]
        finally:
            source.close()
        return [(verdict.status, verdict.value) for verdict in verdicts]

    return judge


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as made:
        yield made


def test_a_chat_model_gives_verdicts_and_what_cannot_be_read_is_unknown(judged: Judged, server: Server) -> None:
    said = {"good": "So 10", "fair": "6", "odd": "well", "down": 503}

    def say(path: str, body: Any) -> Any:
        found = next(said[answer] for answer in said if f"Answer:\n{answer}" in body["messages"][0]["content"])
        return found if isinstance(found, int) else {"choices": [{"message": {"content": found}}]}

    server.say = say
    options = {"endpoint": server.url, "model": "judge"}
    found = judged("chat_judge", *said, **options)
    assert found == [(CORRECT, 1.0), (WRONG, 0.6), (UNKNOWN, 0.0), (UNKNOWN, 0.0)]
    assert judged("chat_judge", "fair", **options, threshold=0.5) == [(CORRECT, 1.0)]
    assert "Reference:\n2" in server.asked[0][1]["messages"][0]["content"]


def test_a_service_gives_verdicts_and_one_that_is_away_none(judged: Judged, server: Server) -> None:
    server.say = lambda path, body: {"score": {"2": 1, "3": 0.25, "?": None}[body["answer"]]}
    found = judged("http_judge", "2", "3", "?", endpoint=server.url, path="/score")
    assert found == [(CORRECT, 1.0), (WRONG, 0.25), (UNKNOWN, 0.0)]
    assert server.asked[0][:2] == ("/score", {"prompt": "1+1=", "answer": "2", "reference": "2"})
    assert judged("http_judge", "2", endpoint="http://127.0.0.1:9", attempts=1) == [(UNKNOWN, 0.0)]


def test_a_wrong_answer_never_earns_what_a_right_one_does(judged: Judged, server: Server) -> None:
    server.say = lambda path, body: {"score": int(body["answer"])}
    found = judged("http_judge", "5", "3", "-1", endpoint=server.url, threshold=5)
    assert found == [(CORRECT, 1.0), (WRONG, 0.6), (WRONG, 0.0)]


def test_two_services_may_keep_their_answers_in_one_folder(judged: Judged, server: Server, tmp_path: Path) -> None:
    server.say = lambda path, body: {"score": 1}
    assert judged("http_judge", "2", endpoint=server.url, cache=str(tmp_path / "kept")) == [(CORRECT, 1.0)]
    with serving() as other:
        other.say = lambda path, body: {"score": 0}
        assert judged("http_judge", "2", endpoint=other.url, cache=str(tmp_path / "kept")) == [(WRONG, 0.0)]
    assert judged("http_judge", "2", endpoint=server.url, cache=str(tmp_path / "kept")) == [(CORRECT, 1.0)]
    assert len(server.asked) == 1


class Guarded(Judge):
    """A judge that scores only those who bring the token."""

    def Judge(self, request: Any, context: grpc.ServicerContext) -> Any:
        if dict(context.invocation_metadata()).get("authorization") != "Bearer secret":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return super().Judge(request, context)


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[Guarded, int, Path]]:
    """A judge behind TLS, its port and the certificate to trust."""
    certificate, key = self_signed(tmp_path, "judge")
    server, made = grpc.server(ThreadPoolExecutor(2)), Guarded()
    judge_pb2_grpc.add_JudgeServiceServicer_to_server(made, server)
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    yield made, port, certificate
    server.stop(None).wait()


def test_a_judge_behind_tls_wants_its_token_and_its_certificate(
    judged: Judged, secure: tuple[Guarded, int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, port, certificate = secure
    made.say = lambda request: {"2": 1.0, "3": 0.5, "?": None}[request.answer]
    (token := tmp_path / "token").write_text("secret\n")
    security = {"ca_file": str(certificate), "token_file": str(token)}
    endpoint = {"endpoint": f"localhost:{port}"}
    found = judged("grpc_judge", "2", "3", "?", **endpoint, security=security)
    assert found == [(CORRECT, 1.0), (WRONG, 0.5), (UNKNOWN, 0.0)]
    assert made.asked[0][1]["authorization"] == "Bearer secret" and made.asked[0][0].reference == "2"
    monkeypatch.setenv("A_TOKEN", "another")
    (wrong,) = judged("grpc_judge", "2", **endpoint, security={"ca_file": str(certificate), "token_env": "A_TOKEN"})
    stranger, _ = self_signed(tmp_path, "stranger")
    (untrusted,) = judged("grpc_judge", "2", **endpoint, attempts=1, security={**security, "ca_file": str(stranger)})
    (clear,) = judged("grpc_judge", "2", **endpoint, attempts=1)
    assert wrong == untrusted == clear == (UNKNOWN, 0.0) and len(made.asked) == 3


@pytest.mark.parametrize(
    ("verifier", "options", "said"),
    [
        ("grpc_judge", {"endpoint": "judge.example:7080", "security": {"token_env": "A_TOKEN"}}, "sent unencrypted"),
        ("chat_judge", {"endpoint": "http://127.0.0.1:9/v1"}, "model"),
        ("chat_judge", {"endpoint": "127.0.0.1:9", "model": "judge"}, "http://"),
        ("exact", {"threshold": 0.5}, "no options.*threshold"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_answer(
    judged: Judged, verifier: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "secret")
    with pytest.raises(ConfigError, match=said):
        judged(verifier, **options)
