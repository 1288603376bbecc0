"""Where a server may listen, and who may call what: bearer tokens with scopes, which reload on change.

The token file is a YAML list of `{name, token | sha256, scopes: [score, admin]}`. If a changed file cannot be read, the
previous contents stay valid, so that a bad deployment does not lock everyone out.
"""

import hashlib
import hmac
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config.text import read_yaml
from opd.errors import AuthError, ConfigError, ScopeError
from opd.wire.bounds import MAX_NAME_CHARS
from opd.wire.channel import is_loopback
from teacher_server.settings import SecuritySettings

_log = logging.getLogger(__name__)

SCOPES = ("score", "admin")
MAX_TOKEN_CHARS = 4096
MAX_TOKEN_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller: a name, for shares and logs, and its scopes."""

    name: str
    scopes: frozenset[str]


ANONYMOUS = Principal("", frozenset({"score"}))
"""The caller on a server without tokens, which may score but not administer."""


def check_listen(host: str, security: SecuritySettings) -> None:
    """Refuses to listen without TLS on an address that other machines can reach.

    Raises:
        ConfigError: unless TLS is on, the address is loopback, or `allow_insecure` is set.
    """
    if security.tls_cert is not None or security.allow_insecure or is_loopback(host):
        return
    raise ConfigError(
        f"host {host} is reachable from other machines, but TLS is off; set --tls-cert and --tls-key, listen on "
        "127.0.0.1, or pass --allow-insecure if the network is private."
    )


class Tokens:
    """The bearer tokens of a server.

    Args:
        path: the token file; None means no authentication.

    Raises:
        ConfigError: if the file is missing or malformed at the start.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: list[tuple[bytes, Principal]] = []
        self._stamp: tuple[int, ...] = ()
        if path is not None:
            # In this order, as in `reload`: if the file is replaced in between, it is read again later.
            self._stamp = _stamp(path)
            self._entries = _read_tokens(path)

    def authenticate(self, metadata: Any, scope: str) -> Principal:
        """The caller of a call that needs `scope`.

        Args:
            metadata: (key, value) pairs of the call.
            scope: "score" or "admin".

        Raises:
            AuthError: if the token is missing or unknown.
            ScopeError: if the token lacks the scope, or for an admin call on a server without tokens.
        """
        if self._path is None:
            if scope not in ANONYMOUS.scopes:
                raise ScopeError(
                    f"this call needs a token with scope {scope!r}, but the server has no tokens; start it with "
                    "--tokens."
                )
            return ANONYMOUS
        principal = self._find(_bearer(metadata))
        if scope not in principal.scopes:
            raise ScopeError(
                f"token {principal.name!r} lacks scope {scope!r}, which this call needs; add it in the server's token "
                "file."
            )
        return principal

    def _find(self, token: str) -> Principal:
        digest = hashlib.sha256(token.encode()).digest()
        found: Principal | None = None
        # Every entry is compared, each in constant time, so that timing does not reveal which one matched.
        for known, principal in self._entries:
            if hmac.compare_digest(digest, known):
                found = principal
        if found is None:
            raise AuthError(
                "the bearer token is not in the server's token file; check the token files of client and server."
            )
        return found

    def reload(self) -> None:
        """Reads the file again if it has changed. This may take seconds: call it on a thread."""
        if self._path is None or (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp  # before the file is read, so that a bad file is refused and logged only once
        try:
            self._entries = _read_tokens(self._path)
            _log.info("tokens reloaded", extra={"count": len(self._entries)})
        except ConfigError as error:
            _log.error("token file refused, old tokens stay", extra={"reason": error})


def _bearer(metadata: Any) -> str:
    for key, value in metadata or ():
        if key == "authorization":
            kind, _, token = str(value).partition(" ")
            if kind.lower() == "bearer" and 0 < len(token) <= MAX_TOKEN_CHARS:
                return token
            raise AuthError("the authorization metadata must be 'Bearer TOKEN'.")
    raise AuthError("this server needs a bearer token in the authorization metadata.")


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        info = path.stat()
    except OSError:
        return ()
    # The inode, because a rename may bring a file with the same time; the size, because a file may be read half
    # written.
    return info.st_mtime_ns, info.st_ino, info.st_size


def _read_tokens(path: Path) -> list[tuple[bytes, Principal]]:
    try:
        if path.stat().st_size > MAX_TOKEN_FILE_BYTES:
            raise ConfigError(
                f"token file {path} has more than {MAX_TOKEN_FILE_BYTES} bytes; split it or remove tokens."
            )
        data = read_yaml(path.read_text(encoding="utf-8"))
        if not isinstance(data, list) or not data:
            raise ConfigError(
                f"token file {path} must be a YAML list whose entries have name, token or sha256, and scopes."
            )
        return [_read_entry(path, index, entry) for index, entry in enumerate(data)]
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(
            f"token file {path} cannot be read: {error.strerror}; check its path and permissions."
        ) from error
    except Exception as error:
        # YAML raises a dozen exception classes for damaged files (impossible dates, nesting, lone surrogates), and
        # their messages quote the file, including its secrets.
        raise ConfigError(f"token file {path} is not valid YAML ({type(error).__name__}); correct it.") from None


def _read_entry(path: Path, index: int, entry: Any) -> tuple[bytes, Principal]:
    where = f"token file {path}, entry {index}"
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"{where} must be a mapping with a name of 1 to {MAX_NAME_CHARS} printable characters.")
    # Here and below, messages name keys and places but never values, which may be secrets.
    unknown = set(entry) - {"name", "token", "sha256", "scopes"}
    if unknown:
        raise ConfigError(f"{where} has unknown keys {sorted(map(str, unknown))}; use name, token, sha256 and scopes.")
    scopes = entry.get("scopes", ["score"])
    if not isinstance(scopes, list) or not all(scope in SCOPES for scope in scopes):
        raise ConfigError(f"{where} has unknown scopes; give a list of {' and '.join(SCOPES)}.")
    if ("token" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where} must have either token or sha256, and not both.")
    if "token" in entry:
        if not isinstance(entry["token"], str) or len(entry["token"]) < 16:
            raise ConfigError(f"{where}: the token must be a string of at least 16 characters.")
        digest = hashlib.sha256(entry["token"].encode()).digest()
    else:
        try:
            digest = bytes.fromhex(entry["sha256"] if isinstance(entry["sha256"], str) else "")
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise ConfigError(f"{where}: sha256 must be a string of 64 hex digits.")
    return digest, Principal(name, frozenset(scopes))
