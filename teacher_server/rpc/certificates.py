"""The server's TLS files as gRPC's credentials, which follow their changes."""

import logging
import time
from pathlib import Path

import grpc

from opd.errors import ConfigError
from opd.tls_files import fault_of
from teacher_server.settings import SecuritySettings

_log = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


class Certificates:
    """Server credentials that follow changes of their files: certificate, key, and certificate authorities of clients.

    Raises:
        ConfigError: if a file cannot be read at the start.
    """

    def __init__(self, security: SecuritySettings) -> None:
        self._security = security
        self._files = [f for f in (security.tls_cert, security.tls_key, security.client_ca) if f is not None]
        self._stamps = self._now()
        self._checked = time.monotonic()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials whose files gRPC has checked at every handshake; connections that are open stay open."""
        return grpc.dynamic_ssl_server_credentials(
            self._read(), self._fetch, require_client_authentication=self._security.client_ca is not None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None to keep the current one."""
        # gRPC asks at every handshake; the files are looked at once a second at most.
        if time.monotonic() - self._checked < RELOAD_SECONDS:
            return None
        self._checked = time.monotonic()
        try:
            stamps = self._now()
            if stamps == self._stamps:
                return None
            fresh = self._read()
        except (ConfigError, ValueError) as error:
            _log.error("certificates refused, old ones stay", extra={"reason": error})
            return None
        self._stamps = stamps
        _log.info("certificates reloaded")
        return fresh

    def _now(self) -> list[tuple[int, int]]:
        try:
            return [(info.st_mtime_ns, info.st_ino) for info in (file.stat() for file in self._files)]
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; check its path and permissions."
            ) from error

    def _read(self) -> grpc.ServerCertificateConfiguration:
        security = self._security
        try:
            pair = [((security.tls_key or Path()).read_bytes(), (security.tls_cert or Path()).read_bytes())]
            roots = security.client_ca.read_bytes() if security.client_ca else None
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}; check its path and permissions."
            ) from error
        if fault := fault_of(security.tls_cert, security.tls_key, security.client_ca, other="client"):
            raise ConfigError(fault)
        return grpc.ssl_server_certificate_configuration(pair, root_certificates=roots)
