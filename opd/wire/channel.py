"""Channels to teacher servers: gRPC options and the client's credentials.

With gRPC's defaults a client notices a frozen server after more than a minute, if ever, and waits up to two minutes
before it reconnects to a server that is back; retries by service config stop at 256 KiB and never cover a stream that
has begun. The options below fix the first two and switch the retries off: each call is attempted once, and the fleet's
client decides about the next attempt.
"""

import ipaddress
import os
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from pydantic import PrivateAttr, model_validator

from opd.config.base import Settings
from opd.errors import AuthError, ConfigError
from opd.tls_files import fault_of

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest message to send and to accept; chunks are far below, requests may be large."""
CONNECT_SECONDS = 5
"""Seconds that an attempt to connect may take."""


class ClientSecurity(Settings):
    """How a client proves who it is and whom it trusts; empty means in the clear and anonymous."""

    tls: bool = False
    """Encrypt the connection with TLS. Servers are checked against ca_file or, without it, the system's certificate
    authorities."""
    ca_file: Path | None = None
    """PEM file with the certificate authorities that sign the servers' certificates; turns TLS on."""
    cert_file: Path | None = None
    """PEM file with this client's certificate, for servers that ask for one (mutual TLS); turns TLS on and needs
    key_file."""
    key_file: Path | None = None
    """PEM file with the private key of cert_file."""
    server_name: str = ""
    """Name to expect in the servers' certificates; empty means the host name of each endpoint."""
    token_file: Path | None = None
    """File with the bearer token that is sent with every call; reloaded when it changes."""
    token_env: str = ""
    """Environment variable that holds the bearer token; token_file takes precedence."""
    allow_clear_token: bool = False
    """Allow the token to be sent without TLS to other machines, where everyone on the way can read it. Not
    recommended."""

    @model_validator(mode="after")
    def _together(self) -> "ClientSecurity":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; set both or neither")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether channels are encrypted."""
        return self.tls or self.ca_file is not None or self.cert_file is not None

    _cache: dict[str, Any] = PrivateAttr(default_factory=dict)

    def token(self) -> str:
        """The current bearer token; "" if none is configured.

        Raises:
            AuthError: if the token file cannot be read, the variable is not set, or either holds no valid token.
        """
        if self.token_file is not None:
            try:
                # The time is taken before the contents: a file that is replaced in between is read again at the next
                # call.
                stamp = self.token_file.stat().st_mtime_ns
                if self._cache.get("stamp") != stamp:
                    data = self.token_file.read_bytes()
                    self._cache["token"] = _token(data, f"token file {self.token_file}")
                    self._cache["stamp"] = stamp
            except OSError as error:
                raise AuthError(
                    f"token file {self.token_file} cannot be read: {error.strerror}; check token_file."
                ) from error
            return str(self._cache["token"])
        if self.token_env:
            return _token(os.fsencode(os.environ.get(self.token_env, "")), f"environment variable {self.token_env}")
        return ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata to pass with every call."""
        token = self.token()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """TLS credentials from the configured files.

        Raises:
            AuthError: if a file cannot be read or is not PEM, or the key does not belong to the certificate.
        """
        roots, key, chain = _read(self.ca_file), _read(self.key_file), _read(self.cert_file)
        if fault := fault_of(self.cert_file, self.key_file, self.ca_file, other="server"):
            raise AuthError(fault)
        return grpc.ssl_channel_credentials(root_certificates=roots, private_key=key, certificate_chain=chain)


def channel_options() -> list[tuple[str, Any]]:
    """The preset: keepalive 10 s, ping timeout 5 s, connections within 5 s, again after at most 2 s, no retries."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Without this, 60 s apply instead of the keepalive timeout.
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        # Despite its name this is not a backoff but the limit on an attempt to connect, handshakes included.
        ("grpc.min_reconnect_backoff_ms", CONNECT_SECONDS * 1000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
        # Otherwise all channels to an address share one connection, and if it is stuck so are they.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


def open_channel(endpoint: str, security: ClientSecurity | None = None) -> grpc.aio.Channel:
    """An asyncio channel to "host:port" or "unix:path" with the preset; nothing is connected yet.

    Raises:
        ConfigError: if a token would leave this host unencrypted.
        AuthError: if a certificate cannot be read.
    """
    credentials, options = _credentials_and_options(endpoint, security or ClientSecurity())
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint, options=options)
    return grpc.aio.secure_channel(endpoint, credentials, options=options)


def open_blocking_channel(endpoint: str, security: ClientSecurity | None = None) -> grpc.Channel:
    """Like `open_channel`, for callers without an event loop.

    Raises:
        ConfigError: if a token would leave this host unencrypted.
        AuthError: if a certificate cannot be read.
    """
    credentials, options = _credentials_and_options(endpoint, security or ClientSecurity())
    if credentials is None:
        return grpc.insecure_channel(endpoint, options=options)
    return grpc.secure_channel(endpoint, credentials, options=options)


def _credentials_and_options(
    endpoint: str, security: ClientSecurity
) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """Credentials (None without TLS) and options of a channel.

    Raises:
        ConfigError: if a token would leave this host unencrypted.
        AuthError: if a certificate cannot be read.
    """
    options = channel_options()
    if is_loopback(endpoint):
        options.append(("grpc.enable_http_proxy", 0))  # of the environment, which cannot reach this host as localhost
    if security.uses_tls:
        if security.server_name:
            options.append(("grpc.ssl_target_name_override", security.server_name))
        return security.channel_credentials(), options
    has_token = security.token_file is not None or bool(security.token_env)
    if has_token and not security.allow_clear_token and not is_loopback(endpoint):
        raise ConfigError(f"the token for {endpoint} would be sent unencrypted; turn on TLS with tls or ca_file.")
    return None, options


def proxy_for(endpoint: str) -> str:
    """The environment variable whose proxy gRPC takes to an endpoint, unless no_grpc_proxy or no_proxy names its host.

    "" for none. A host is spared if it ends with one of the names in those lists.
    """
    if is_loopback(endpoint):
        return ""
    host = endpoint.rpartition(":")[0] or endpoint
    # gRPC reads these in lower case only.
    spared = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""  # noqa: SIM112
    if any(host.endswith(part.strip()) for part in spared.split(",") if part.strip()):
        return ""
    return next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)), "")


def is_loopback(endpoint: str) -> bool:
    """Whether a host, "host:port" or "unix:path" stays on this host, judged by its spelling: no name is resolved."""
    if endpoint.startswith("unix:"):
        return True
    host = endpoint.partition("]")[0].removeprefix("[") if endpoint.startswith("[") else endpoint
    if host.count(":") == 1:
        host = host.partition(":")[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, which may resolve to anything by the time of the connection


def _token(data: bytes, where: str) -> str:
    """The token in a file or variable. Other contents are refused: gRPC would fail on them without naming either."""
    token = data.strip()
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise AuthError(f"{where} does not hold a token; give one line of printable ASCII without spaces.")
    return token.decode("ascii")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise AuthError(
            f"credentials file {path} cannot be read: {error.strerror}; check its path and permissions."
        ) from error
