from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from certificates import self_signed
from waiting import PATIENCE

from opd.errors import AuthError, OpdError, UnavailableError
from opd.fleet.client import TeacherFleet
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


def test_a_token_file_that_cannot_be_read_is_named(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"token file .*absent"):
        connect(tiny, tiny.serve().address, 0.1, token_file=tmp_path / "absent")
