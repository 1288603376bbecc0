"""Who gets in, how many at once, and how calls end that are not answered."""

import asyncio
import base64
import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import requests
from certificates import Authority
from waiting import EngineGate, until

from opd.errors import ConfigError, PortInUseError
from opd.wire.channel import ClientSecurity

SECRET = "a-secret-of-the-trainer"
COMPLETION = {"model": "t", "prompt": [1, 2, 3, 4], "max_tokens": 1, "prompt_logprobs": 1}
SCORED = "/v1/completions"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.yaml"
    path.write_text(
        f"- {{name: trainer, token: {SECRET}}}\n- {{name: op, token: operator-secret-1, scopes: [admin]}}\n"
    )
    return path


async def test_the_door_is_closed_unless_it_is_asked_for(start: Any) -> None:
    assert (await start()).server.http_port == 0


def test_the_flag_opens_the_door_of_a_server_process_until_it_is_told_to_end(launch: Any) -> None:
    process = launch("--http-port", "0")
    address = f"http://127.0.0.1:{process.http_port}{SCORED}"
    assert requests.post(address, json=COMPLETION, timeout=120).status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(120) == 0, process.lines()
    assert "Traceback" not in process.lines()
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.post(address, json=COMPLETION, timeout=120)


async def test_health_asks_for_no_token_and_models_do(door: Any, tokens: Path) -> None:
    caller = await door(security_={"tokens": tokens})
    assert (await caller.get("/health")).status_code == 200
    assert (await caller.get("/v1/models")).status_code == 401
    answer = await caller.get("/v1/models", headers={"Authorization": f"Bearer {SECRET}"})
    (model,) = answer.json()["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("t", "numpy", 100_000)
    assert model["opd"]["tokenizer_fingerprint"] == "f" * 64


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (f"Bearer {SECRET}", 200),
        (f"bearer {SECRET}", 200),
        ("Basic " + base64.b64encode(f"anyone:{SECRET}".encode()).decode(), 200),
        ("Basic " + base64.b64encode(f":{SECRET}".encode()).decode(), 200),
        ("Basic " + base64.b64encode(f"{SECRET}:".encode()).decode(), 401),
        ("Basic " + base64.b64encode(SECRET.encode()).decode(), 401),
        ("Basic not/base64!", 401),
        ("Basic " + base64.b64encode(b"\xff:\xff").decode(), 401),
        ("Bearer wrong-secret-of-anyone", 401),
        (f"Digest {SECRET}", 401),
        ("", 401),
        ("Bearer operator-secret-1", 403),
    ],
)
async def test_a_call_needs_a_token_with_the_scope(door: Any, tokens: Path, header: str, status: int) -> None:
    caller = await door(security_={"tokens": tokens})
    answer = await caller.post(SCORED, COMPLETION, headers={"Authorization": header} if header else {})
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)


async def test_a_token_may_stand_in_the_address(door: Any, tokens: Path) -> None:
    caller = await door(security_={"tokens": tokens})
    address = caller.url.replace("://", f"://trl:{SECRET}@") + SCORED
    assert (await asyncio.to_thread(requests.post, address, json=COMPLETION)).status_code == 200


async def test_the_door_has_the_servers_tls(door: Any, tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    cert, key = ca.issue("server")
    mine, mine_key = ca.issue("trainer")
    tls = {"tls_cert": cert, "tls_key": key}
    caller = await door(scheme="https", security_=tls, security=ClientSecurity(ca_file=ca.pem))
    assert (await caller.get("/health", verify=str(ca.pem))).status_code == 200
    with pytest.raises(requests.exceptions.SSLError):
        await caller.get("/health")
    both = await door(scheme="https", security_=tls | {"client_ca": ca.pem})
    with pytest.raises(requests.exceptions.ConnectionError):
        await both.get("/health", verify=str(ca.pem))
    answer = await both.get("/health", verify=str(ca.pem), cert=(str(mine), str(mine_key)))
    assert answer.status_code == 200


async def test_a_renewed_certificate_is_used_and_a_wrong_one_is_not(door: Any, tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old.issue("server")
    tls = {"tls_cert": cert, "tls_key": key}
    caller = await door(scheme="https", security_=tls, security=ClientSecurity(ca_file=old.pem))
    listener = caller.grpc.server._door
    key.write_text("damaged")
    listener.reload()
    assert (await caller.get("/health", verify=str(old.pem))).status_code == 200
    new.issue("server")
    listener.reload()
    assert (await caller.get("/health", verify=str(new.pem))).status_code == 200


async def test_a_port_in_use_is_refused_by_name(door: Any, start: Any) -> None:
    caller = await door()
    with pytest.raises(PortInUseError, match="--http-port"):
        await start(http={"port": caller.grpc.server.http_port})


async def test_without_the_extra_the_door_says_what_to_install(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "teacher_server.http.listen", None)
    with pytest.raises(ConfigError, match=r"opd\[http\]"):
        await start(http={"port": 0})


async def test_a_full_server_says_503_and_when_to_come_back(door: Any) -> None:
    caller = await door(limits={"max_tokens_in_flight": 100, "max_client_share": 1.0})
    caller.grpc.engines["numpy"].before_score = gate = EngineGate()
    first = asyncio.create_task(caller.post(SCORED, COMPLETION | {"prompt": [1] * 90}))
    await until(lambda: gate.held)
    answer = await caller.post(SCORED, COMPLETION | {"prompt": [1] * 20})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "OverloadedError"
    gate.open()
    assert (await first).status_code == 200
    await caller.grpc.settled()


async def test_the_answers_own_size_counts_against_the_memory(door: Any) -> None:
    room = {"max_reply_bytes_in_flight": 400_000}
    caller = await door(limits=room)
    message = await caller.refused(SCORED, COMPLETION | {"prompt": [1] * 100, "prompt_logprobs": 90})
    assert "bytes of memory" in message


async def test_both_doors_share_the_slots_for_open_calls(door: Any, items: Any) -> None:
    caller = await door(calls={"max_calls": 2, "max_caller_share": 1.0})
    caller.grpc.engines["numpy"].before_score = gate = EngineGate()
    calls = [asyncio.create_task(caller.post(SCORED, COMPLETION)) for _ in range(2)]
    await until(lambda: caller.grpc.server._gate.authorised.used == 2)
    assert (await caller.get("/v1/models")).status_code == 503
    gate.open()
    assert [call.status_code for call in await asyncio.gather(*calls)] == [200, 200]


async def test_a_draining_server_answers_what_it_has_and_refuses_the_rest(door: Any) -> None:
    caller = await door()
    caller.grpc.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(caller.post(SCORED, COMPLETION))
    await until(lambda: gate.held)
    caller.grpc.server.stop()
    ending = asyncio.create_task(caller.grpc.server.wait())
    await until(lambda: caller.grpc.server.shared.refusing)
    assert (await caller.get("/health")).status_code == 503
    refused = await caller.post(SCORED, COMPLETION)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    gate.open()
    assert (await running).status_code == 200
    assert await ending == 0
    with pytest.raises(requests.exceptions.ConnectionError):
        await caller.get("/health")


async def test_a_second_stop_cuts_off_what_is_running(door: Any) -> None:
    caller = await door(grace_seconds=600.0)
    caller.grpc.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(caller.post(SCORED, COMPLETION))
    await until(lambda: gate.held)
    server = caller.grpc.server
    server.stop()
    ending = asyncio.create_task(server.wait())
    await until(lambda: server.shared.refusing)
    server.stop()
    await until(lambda: server.shared.scoring == 0)
    gate.open()
    assert await ending == 0
    assert (await running).status_code == 503


async def connect(caller: Any, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", caller.grpc.server.http_port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def head(length: int, *more: str) -> bytes:
    lines = [f"POST {SCORED} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def test_a_caller_that_leaves_gives_back_what_it_held(door: Any) -> None:
    caller = await door()
    caller.grpc.engines["numpy"].before_score = gate = EngineGate()
    data = json.dumps(COMPLETION).encode()
    _, writer = await connect(caller, head(len(data)) + data)
    await until(lambda: gate.held)
    writer.close()
    await until(lambda: caller.grpc.server.shared.budget.closed == 1)
    gate.open()
    await caller.grpc.settled()


async def test_an_oversize_body_is_refused_before_it_is_read(door: Any) -> None:
    caller = await door(limits={"max_request_bytes": 2000})
    reader, writer = await connect(caller, head(2001))
    answer = await reader.read()
    assert b" 400 " in answer and b"2000 bytes" in answer and b"connection: close" in answer.lower()
    writer.close()
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reader, writer = await connect(caller, chunked + b"fff\r\n" + b"1" * 4095 + b"\r\n")
    assert b"2000 bytes" in await reader.read()
    writer.close()


async def test_a_compressed_body_is_refused(door: Any) -> None:
    caller = await door()
    answer = await caller.post(
        SCORED, data=gzip.compress(json.dumps(COMPLETION).encode()), headers={"Content-Encoding": "gzip"}
    )
    assert answer.status_code == 400 and "content-encoding" in answer.json()["error"]["message"]


async def test_a_body_that_does_not_arrive_is_given_up(door: Any) -> None:
    caller = await door(calls={"receive_seconds": 0.2})
    reader, writer = await connect(caller, head(100) + b"{")
    assert b" 504 " in await reader.read()
    writer.close()


async def test_a_head_that_does_not_arrive_is_given_up(door: Any) -> None:
    caller = await door(calls={"receive_seconds": 0.2})
    for begun in (b"", b"POST /v1/comp", head(0).replace(b"\r\n\r\n", b"\r\nX: ")):
        reader, writer = await connect(caller, begun)
        assert await reader.read() == b""
        writer.close()


async def test_a_reader_that_takes_nothing_is_given_up(door: Any) -> None:
    caller = await door(limits={"send_timeout_seconds": 0.2})
    data = json.dumps(COMPLETION | {"prompt": [1] * 60_000, "prompt_logprobs": 9}).encode()
    _, writer = await connect(caller, head(len(data)) + data)
    await until(lambda: caller.grpc.server.shared.budget.closed == 1)
    await caller.grpc.settled()
    writer.close()


async def test_there_are_only_so_many_connections(door: Any) -> None:
    caller = await door(http={"port": 0, "max_connections": 2})
    held = [await connect(caller, b"") for _ in range(2)]
    await until(lambda: len(caller.grpc.server._door._server.server_state.connections) == 2)
    reader, writer = await connect(caller, b"")
    with pytest.raises(ConnectionError):
        assert await reader.read() == b""
        raise ConnectionResetError
    for _, one in [*held, (None, writer)]:
        one.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"a": [' + b"[]," * 300_000 + b"[]]}",
        b'{"a": "' + b"x" * 10 + b'", "b": ' + b'["",' * 5000,
        '{"a": 1}'.encode("utf-16"),
    ],
    ids=range(13),
)
async def test_a_hostile_body_is_a_refusal(door: Any, body: bytes) -> None:
    caller = await door()
    answer = await caller.post(SCORED, data=body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "InvalidRequestError"
    await caller.grpc.settled()


async def test_unknown_paths_and_methods_are_told_so(door: Any) -> None:
    caller = await door()
    assert (await caller.post("/v1/chat/completions", {})).status_code == 404
    assert (await caller.get(SCORED)).status_code == 405


async def test_calls_of_this_door_are_counted_as_all_are(door: Any) -> None:
    caller = await door()
    await caller.ok(SCORED, COMPLETION)
    await caller.refused(SCORED, COMPLETION | {"prompt_logprobs": 98})
    metrics = caller.grpc.server.shared.metrics
    assert metrics.requests.labels("t", "topk", "OK")._value.get() == 1
    assert metrics.requests.labels("t", "topk", "INVALID_ARGUMENT")._value.get() == 1
    assert metrics.scored_tokens.labels("t", "topk")._value.get() == 3
