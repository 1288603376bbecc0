"""How the connection to each server of a fleet is protected: TLS or not, whose certificate, how long it is valid."""

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator, Sequence

from opd.doctor.finding import Finding
from opd.errors import ConfigError
from opd.fleet.membership.discovery import parse_endpoints, recorded_folder, split_address
from opd.wire.channel import ClientSecurity, is_loopback

_SECONDS = 5.0
_SOON_DAYS = 14


def examine_tls(endpoints: Sequence[str], security: ClientSecurity) -> Iterator[Finding]:
    """A finding per server that the endpoints name; names that cannot be resolved are left to the fleet's report."""
    for address in sorted(_addresses(endpoints)):
        if address.startswith("unix:"):
            continue
        if security.uses_tls:
            yield _certificate(address, security)
        elif is_loopback(address):
            yield Finding("ok", address, "unencrypted, on loopback only")
        else:
            text = (
                "prompts and answers cross the network unencrypted; give the server --tls-cert and --tls-key, and the "
                "client security.ca_file"
            )
            yield Finding("note", address, text)


def _addresses(endpoints: Sequence[str]) -> set[str]:
    found: set[str] = set()
    try:
        if recorded_folder(endpoints) is None:
            for source in parse_endpoints(endpoints):
                found |= asyncio.run(source.resolve()).keys()
    except (ConfigError, OSError):
        pass
    return found


def _certificate(address: str, security: ClientSecurity) -> Finding:
    """A finding from a handshake like gRPC's: whether it succeeds, and when the server's certificate expires."""
    host, port = split_address(address)
    name = security.server_name or host
    try:
        context = ssl.create_default_context(cafile=security.ca_file)
        if security.cert_file is not None:
            context.load_cert_chain(security.cert_file, security.key_file)
    except OSError as error:  # includes SSLError: a file is missing, or is not what it should be
        files = ", ".join(str(file) for file in (security.ca_file, security.cert_file, security.key_file) if file)
        return Finding("fail", address, f"this client's own TLS files cannot be used ({error}); check {files}")
    try:
        # gRPC speaks only HTTP/2, and its servers refuse a handshake that does not offer it.
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=name) as secure,
        ):
            certificate, version = secure.getpeercert() or {}, secure.version()
    except ssl.SSLCertVerificationError as error:
        return Finding(
            "fail",
            address,
            f"its certificate is not valid for {name}: {error.verify_message}; check security.ca_file and server_name",
        )
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return Finding("fail", address, f"the TLS handshake failed: {reason}; check that the server uses TLS")
    except OSError as error:
        return Finding("fail", address, f"cannot be reached: {error.strerror or error}")
    days = (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86400
    mutual = ", with this client's certificate" if security.cert_file is not None else ""
    text = f"{version}{mutual}; its certificate is for {name} and valid for {days:.0f} more days"
    if days < _SOON_DAYS:
        return Finding("note", address, f"{text}: renew it; servers read the file again when it changes")
    return Finding("ok", address, text)
