"""Checks of PEM files for TLS, because gRPC refuses bad ones without giving a reason."""

import ssl
from pathlib import Path


def fault_of(cert: Path | None, key: Path | None, authorities: Path | None, *, other: str) -> str:
    """What is wrong with the files of one end of a TLS connection, in a sentence that names them; "" if nothing is.

    Args:
        cert: PEM certificate chain of this end; None if `key` is None.
        key: PEM key of the chain's first certificate, or None.
        authorities: PEM certificates of the authorities that sign the other end's certificate, or None.
        other: what the other end is, "client" or "server".
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if cert is not None and key is not None:
        try:
            # With an empty password, an encrypted key is an error instead of a prompt on the terminal.
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            reason = getattr(error, "reason", None) or "not PEM, or the key is encrypted"
            return (
                f"certificate {cert} and key {key} cannot be used together ({reason}); give a PEM chain and its own "
                "key, without a password."
            )
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except OSError:
            return (
                f"file {authorities} with the authorities of {other} certificates holds no PEM certificate; give that "
                "of the CA."
            )
    return ""
