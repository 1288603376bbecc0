"""Who sent a request: the key by which shares of budgets and of the engine are counted."""

from typing import NamedTuple


class Client(NamedTuple):
    """A client, as far as shares of the budgets and of the engine are concerned.

    Shares are divided among principals first. A name only divides its principal's share: callers choose names freely,
    so a new name for every call must not gain anything.

    Attributes:
        principal: the caller's identity: its token's name, or its address if there are no tokens.
        name: the `client` field of the request; "" if it is not set.
    """

    principal: str
    name: str
