"""Who sent a request: the key by which budgets and the engine are shared."""

from typing import NamedTuple


class Client(NamedTuple):
    """A client, for shares of budgets and of the engine.

    Shares are divided among principals first. A name divides its principal's share only: callers choose names freely,
    so a new name for every call must gain nothing.

    Attributes:
        principal: identity by the credentials, or the address where there are none.
        name: `client` of the request, "" when it is not set.
    """

    principal: str
    name: str
