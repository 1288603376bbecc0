"""Who gets in: TLS, mutual TLS, tokens, scopes, reloads; and what the wire can never reach."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from cryptography.hazmat.primitives import serialization
from waiting import EngineGate, until

from opd.errors import AuthError, ConfigError
from opd.wire.channel import ClientSecurity, is_loopback, open_channel
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from teacher_server.calls.tokens import check_listen
from teacher_server.rpc.certificates import Certificates
from teacher_server.settings import SecuritySettings

SAMPLED = PayloadSpec.sampled()


async def describe(address: str, security: ClientSecurity, timeout: float = 120.0) -> Any:
    async with open_channel(address, security) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        return await stub.Describe(pb.DescribeRequest(), timeout=timeout, metadata=security.metadata())


async def refused(address: str, security: ClientSecurity) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        await describe(address, security)
    return caught.value.code()


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.5", "teacher.example", "[::]", "localhost.example", "127.example"]
)
def test_listening_in_the_clear_beyond_loopback_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="allow-insecure"):
        check_listen(host, SecuritySettings())
    check_listen(host, SecuritySettings(allow_insecure=True))
    check_listen(host, SecuritySettings(tls_cert=Path("c"), tls_key=Path("k")))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_loopback_may_be_clear(host: str) -> None:
    assert is_loopback(host)
    check_listen(host, SecuritySettings())


async def test_the_server_itself_refuses_to_start_in_the_clear(start: Any) -> None:
    with pytest.raises(ConfigError, match="TLS is off"):
        await start(host="0.0.0.0")


@pytest.mark.parametrize("half", [{"tls_cert": "a"}, {"tls_key": "a"}, {"client_ca": "a"}])
def test_half_a_tls_configuration_is_refused(half: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="tls_cert"):
        SecuritySettings(**half)


async def test_tls_keeps_out_clear_clients_and_wrong_authorities(start: Any, items: Any, tmp_path: Path) -> None:
    ca, stranger = Authority(tmp_path, "ca"), Authority(tmp_path, "stranger")
    cert, key = ca.issue("server")
    client = await start(security=ClientSecurity(ca_file=ca.pem), security_={"tls_cert": cert, "tls_key": key})
    assert len(await client.score(items(2), SAMPLED)) == 2
    assert await refused(client.address, ClientSecurity()) is grpc.StatusCode.UNAVAILABLE
    assert await refused(client.address, ClientSecurity(ca_file=stranger.pem)) is grpc.StatusCode.UNAVAILABLE
    wrong_name = ClientSecurity(ca_file=ca.pem, server_name="other.example")
    assert await refused(client.address, wrong_name) is grpc.StatusCode.UNAVAILABLE


async def test_an_expired_server_certificate_is_refused(start: Any, tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    cert, key = ca.issue("server", days=-1)
    client = await start(security_={"tls_cert": cert, "tls_key": key})
    assert await refused(client.address, ClientSecurity(ca_file=ca.pem)) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_wants_a_certificate_of_the_right_authority(start: Any, items: Any, tmp_path: Path) -> None:
    ca, stranger = Authority(tmp_path, "ca"), Authority(tmp_path, "stranger")
    cert, key = ca.issue("server")
    good, good_key = ca.issue("student")
    bad, bad_key = stranger.issue("intruder")
    old, old_key = ca.issue("retired", days=-1)
    client = await start(
        security=ClientSecurity(ca_file=ca.pem, cert_file=good, key_file=good_key),
        security_={"tls_cert": cert, "tls_key": key, "client_ca": ca.pem},
    )
    assert len(await client.score(items(1), SAMPLED)) == 1
    for mine in (None, (bad, bad_key), (old, old_key)):
        pair = {"cert_file": mine[0], "key_file": mine[1]} if mine else {}
        assert await refused(client.address, ClientSecurity(ca_file=ca.pem, **pair)) is grpc.StatusCode.UNAVAILABLE


async def test_a_renewed_certificate_is_used_without_dropping_open_calls(
    start: Any, items: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teacher_server.rpc.certificates.RELOAD_SECONDS", 0.0)
    old_ca, new_ca = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old_ca.issue("server")
    client = await start(security=ClientSecurity(ca_file=old_ca.pem), security_={"tls_cert": cert, "tls_key": key})
    client.engines["numpy"].before_score = gate = EngineGate()
    running = asyncio.create_task(client.score(items(1), SAMPLED))
    await until(lambda: gate.held)
    new_ca.issue("server")
    assert await describe(client.address, ClientSecurity(ca_file=new_ca.pem))
    assert await refused(client.address, ClientSecurity(ca_file=old_ca.pem)) is grpc.StatusCode.UNAVAILABLE
    gate.open()
    assert len(await running) == 1
    assert len(await client.score(items(1), SAMPLED)) == 1
    # A half-written file keeps what was valid before.
    key.write_text("garbage")
    key.unlink()
    assert await describe(client.address, ClientSecurity(ca_file=new_ca.pem))


async def test_a_certificate_renewed_before_its_key_waits_for_it(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teacher_server.rpc.certificates.RELOAD_SECONDS", 0.0)
    old_ca, new_ca = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    cert, key = old_ca.issue("server")
    client = await start(security_={"tls_cert": cert, "tls_key": key})
    old_key = key.read_bytes()
    new_ca.issue("server")
    new_key = key.read_bytes()
    key.write_bytes(old_key)
    assert await describe(client.address, ClientSecurity(ca_file=old_ca.pem))
    key.write_bytes(new_key)
    assert await describe(client.address, ClientSecurity(ca_file=new_ca.pem))


def test_unusable_certificates_are_named_before_anything_listens(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    cert, key = ca.issue("a")
    other_key = ca.issue("b")[1]
    junk, encrypted = tmp_path / "junk.pem", tmp_path / "encrypted.key"
    junk.write_text("no PEM")
    encrypted.write_bytes(
        serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    def refusal(cert: Path, key: Path, ca: Path | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            Certificates(SecuritySettings(tls_cert=cert, tls_key=key, client_ca=ca)).credentials()
        return str(caught.value)

    Certificates(SecuritySettings(tls_cert=cert, tls_key=key, client_ca=ca.pem)).credentials()
    for one, two in ((junk, key), (cert, junk), (cert, other_key), (cert, encrypted)):
        assert str(one) in (said := refusal(one, two)) and str(two) in said
    assert f"file {junk} with the authorities of client certificates" in refusal(cert, key, junk)
    assert "cannot be read" in refusal(tmp_path, key) and "cannot be read" in refusal(cert, tmp_path / "none")


async def test_tokens_are_needed_known_and_scoped(start: Any, items: Any, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"admin-only-secret").hexdigest()
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        f"- {{name: student, token: student-secret-1}}\n- {{name: op, sha256: {digest}, scopes: [admin]}}\n"
    )
    secret = tmp_path / "secret"
    secret.write_text("student-secret-1\n")
    client = await start(security=ClientSecurity(token_file=secret), security_={"tokens": tokens})
    assert len(await client.score(items(1), SAMPLED)) == 1
    assert await refused(client.address, ClientSecurity()) is grpc.StatusCode.UNAUTHENTICATED
    secret.write_text("student-secret-2")
    assert await refused(client.address, ClientSecurity(token_file=secret)) is grpc.StatusCode.UNAUTHENTICATED
    secret.write_text("admin-only-secret")
    assert await refused(client.address, ClientSecurity(token_file=secret)) is grpc.StatusCode.PERMISSION_DENIED
    failures = client.server.shared.metrics.auth_failures
    assert failures.labels("token")._value.get() == 2
    assert failures.labels("scope")._value.get() == 1
    for header in ("student-secret-1", "Basic student-secret-1", "Bearer ", "Bearer " + "x" * 5000):
        with pytest.raises(grpc.RpcError) as caught:
            await client.stub.GetLoad(pb.GetLoadRequest(), metadata=(("authorization", header),))
        assert type(error_from_rpc(caught.value)) is AuthError


async def test_health_needs_no_token(start: Any, tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    tokens = tmp_path / "t.yaml"
    tokens.write_text("- {name: a, token: student-secret-1}\n")
    client = await start(security_={"tokens": tokens})
    answer = await health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_services_that_would_tell_too_much_are_not_there(start: Any) -> None:
    client = await start()
    for method in (
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await client.channel.unary_unary(method)(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_token_does_not_leave_the_host_in_the_clear(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("student-secret-1")
    with pytest.raises(ConfigError, match="unencrypted"):
        open_channel("teacher.example:9000", ClientSecurity(token_file=secret))
    await open_channel("127.0.0.1:9000", ClientSecurity(token_file=secret)).close()


async def test_neither_tokens_nor_prompts_reach_the_log(
    start: Any, items: Any, tmp_path: Path, log_text: Callable[[], str]
) -> None:
    tokens = tmp_path / "t.yaml"
    tokens.write_text("- {name: a, token: student-secret-1}\n")
    secret = tmp_path / "secret"
    secret.write_text("student-secret-1")
    client = await start(
        security=ClientSecurity(token_file=secret), security_={"tokens": tokens}, log={"requests": True}
    )
    asked = items(1)
    await client.score(asked, SAMPLED)
    with pytest.raises(grpc.RpcError):
        await client.score(asked, SAMPLED, expected_weights_hash="x")
    with pytest.raises(grpc.RpcError):
        await client.stub.GetLoad(pb.GetLoadRequest(), metadata=(("authorization", "Bearer wrong-secret-9999"),))
    text = log_text()
    assert "request failed" in text
    assert "secret-" not in text
    assert asked[0].token_ids.tobytes().hex() not in text
