"""The identity of a caller, and the key by which its share of places, memory and engine time is counted."""

import ipaddress
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call.

    Attributes:
        name: of the token, for logs; "" without one.
        key: what shares are counted by: the token's name, or the address where there are no tokens. Nothing that a
            caller could choose anew for each call.
        authorised: whether the caller may use the teachers; others may ask for health only.
    """

    name: str
    key: str
    authorised: bool


CALLER: ContextVar[Caller] = ContextVar("caller")
"""Who makes the call that is being handled."""


def peer_address(peer: str) -> str:
    """The address of a peer without its port; of an IPv6 peer its /64 network, since a host has all of that.

    Args:
        peer: as gRPC names it: "ipv4:10.0.0.1:5000", "ipv6:%5B::1%5D:5000", "unix:path"; "" once it has left.
    """
    kind, _, rest = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    # Without port, brackets and the zone of a link-local address.
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
