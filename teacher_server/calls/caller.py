"""The identity of a caller, and the key by which its share of call slots, memory and engine time is counted."""

import ipaddress
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a call.

    Attributes:
        name: name of its token, for logs; "" without a token.
        key: the key by which shares are counted: the token's name, or the network address if there are no tokens. A
            caller must not be able to choose it anew for each call.
        authorised: whether the caller may use the teachers; others may only ask for health.
    """

    name: str
    key: str
    authorised: bool


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller of the call that is being handled."""


def peer_address(peer: str) -> str:
    """A peer's address without the port; for IPv6 its /64 network, since a host usually has a whole one to itself.

    Args:
        peer: as gRPC names it: "ipv4:10.0.0.1:5000", "ipv6:%5B::1%5D:5000", "unix:path"; "" once the peer has left.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    # Strip the port, the brackets and the zone of a link-local address.
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
