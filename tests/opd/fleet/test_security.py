import datetime
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from opd.errors import AuthError, OpdError, UnavailableError
from opd.fleet.client import TeacherFleet
from opd.wire.channel import ClientSecurity
from opd.wire.types import PayloadSpec


def certificate(folder: Path, name: str, days: int = 1) -> tuple[Path, grpc.ServerCredentials]:
    """A self-signed certificate for localhost, its file, and server credentials with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=3))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = signed.public_bytes(serialization.Encoding.PEM)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{name}.pem"
    path.write_bytes(pem)
    return path, grpc.ssl_server_credentials([(secret, pem)])


def connect(tiny: SimpleNamespace, address: str, **security: object) -> TeacherFleet:
    update = {"security": ClientSecurity.model_validate(security), "connect_seconds": 2.0}
    return TeacherFleet.connect(address, settings=tiny.settings.model_copy(update=update))


def test_tls_works_and_every_mismatch_is_one_sentence_with_the_replica(tiny: SimpleNamespace, tmp_path: Path) -> None:
    good, credentials = certificate(tmp_path, "good")
    wrong, _ = certificate(tmp_path, "wrong")
    expired, old = certificate(tmp_path, "expired", days=-1)
    server, clear, stale = tiny.serve(credentials=credentials), tiny.serve(), tiny.serve(credentials=old)
    local = f"localhost:{server.port}"
    with connect(tiny, local, ca_file=good) as fleet:
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
            connect(tiny, address, **security)
        assert address in str(caught.value), caught.value


def test_a_token_file_that_cannot_be_read_is_named(tiny: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match=r"token file .*absent"):
        connect(tiny, tiny.serve().address, token_file=tmp_path / "absent")
