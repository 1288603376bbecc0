"""By whom work was asked for: the key of every share."""

from typing import NamedTuple


class Client(NamedTuple):
    """A client, for shares of budgets and of the engine.

    Shares are divided among principals first. A name divides its principal's share only: a caller may choose it anew
    for every call, so it must not gain anything by that.

    Attributes:
        principal: who calls by the credentials, or the address where there are none.
        name: what the request says, "" when it says nothing.
    """

    principal: str
    name: str
