from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from certificates import self_signed
from prometheus_client import CollectorRegistry
from waiting import PATIENCE

from opd.errors import AuthError, OpdError, UnavailableError
from opd.fleet.client import TeacherFleet
from opd.fleet.membership.grpc_link import GrpcLink
from opd.fleet.settings import CallSettings
from opd.telemetry.metrics_http import serve_metrics
from opd.wire.channel import ClientSecurity
from opd.wire.types import PayloadSpec


def certificate(folder: Path, name: str, days: int = 1) -> tuple[Path, grpc.ServerCredentials]:
    """A self-signed certificate for localhost, its file, and server credentials with it."""
    path, key = self_signed(folder, name, days)
    return path, grpc.ssl_server_credentials([(key.read_bytes(), path.read_bytes())])


def connect(tiny: SimpleNamespace, address: str, seconds: float, **security: object) -> TeacherFleet:
    update = {"security": ClientSecurity.model_validate(security)}
    return TeacherFleet.connect(
        address, settings=tiny.settings.model_copy(update={**update, "connect_seconds": seconds})
    )


def test_tls_works_and_every_mismatch_is_one_sentence_with_the_replica(tiny: SimpleNamespace, tmp_path: Path) -> None:
    good, credentials = certificate(tmp_path, "good")
    wrong, _ = certificate(tmp_path, "wrong")
    expired, old = certificate(tmp_path, "expired", days=-1)
    server, clear, stale = tiny.serve(credentials=credentials), tiny.serve(), tiny.serve(credentials=old)
    local = f"localhost:{server.port}"
    with connect(tiny, local, PATIENCE, ca_file=good) as fleet:
        assert len(fleet.score("math", tiny.items(3), PayloadSpec.sampled())) == 3
    cases: list[tuple[str, dict[str, object], type[OpdError], str]] = [
        (local, {}, UnavailableError, "expects TLS"),
        (local, {"ca_file": wrong}, AuthError, "check ca_file"),
        (server.address, {"ca_file": good}, AuthError, "server_name"),
        (clear.address, {"ca_file": good}, AuthError, "whether the server uses TLS at all"),
        (f"localhost:{stale.port}", {"ca_file": expired}, AuthError, "certificate has expired"),
    ]
    for address, security, kind, words in cases:
        with pytest.raises(kind, match=words) as caught:
            connect(tiny, address, 0.1, **security)
        assert address in str(caught.value), caught.value


def test_the_port_of_the_metrics_is_told_from_a_server_that_is_down(tiny: SimpleNamespace) -> None:
    page, thread = serve_metrics(CollectorRegistry(), 0)
    try:
        with pytest.raises(UnavailableError, match="not speak gRPC"):
            connect(tiny, f"127.0.0.1:{page.server_port}", 0.1)
    finally:
        page.shutdown()
        page.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("security", "words"),
    [
        ({}, "expects TLS: set ca_file"),
        ({"ca_file": "ca.pem"}, "asks for a client certificate: set cert_file and key_file"),
        ({"ca_file": "ca.pem", "cert_file": "me.pem", "key_file": "me.key"}, "does not trust me.pem"),
    ],
)
def test_a_server_that_closes_without_a_word_may_miss_what_the_client_does_not_give(
    security: dict[str, str], words: str
) -> None:
    link = GrpcLink("h:1", ClientSecurity.model_validate(security), CallSettings(), "test")
    nothing = grpc.aio.Metadata()
    closed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
    with pytest.raises(UnavailableError, match=f"Socket closed, .*{words}"):
        raise link._named(closed)


def test_a_server_that_has_answered_before_is_not_said_to_miss_credentials() -> None:
    link, nothing = GrpcLink("h:1", ClientSecurity(), CallSettings(), "test"), grpc.aio.Metadata()
    link._answered = True
    closed = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "Socket closed")
    with pytest.raises(UnavailableError, match="the server has ended, or the network to it is cut") as raised:
        raise link._named(closed)
    assert "TLS" not in str(raised.value)


def test_a_key_of_another_certificate_and_authorities_that_are_none_are_named_before_any_handshake(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    mine, _ = self_signed(tmp_path, "mine")
    _, others = self_signed(tmp_path, "others")
    page = tmp_path / "page.html"
    page.write_text("<html>not found</html>")
    address = tiny.serve().address
    with pytest.raises(AuthError, match=r"mine.*others.*MISMATCH"):
        connect(tiny, address, 0.1, ca_file=mine, cert_file=mine, key_file=others)
    with pytest.raises(AuthError, match=r"page\.html .*no PEM"):
        connect(tiny, address, 0.1, ca_file=page)


def test_a_token_file_that_cannot_be_read_is_named(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"token file .*absent"):
        connect(tiny, tiny.serve().address, 0.1, token_file=tmp_path / "absent")
