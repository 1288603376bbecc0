"""Admission control: what a request costs, whether the budget has room for it, and when to retry if it has not.

Tokens bound the wait for the engine, bytes bound the memory. A request holds its share of both from before its ids are
unpacked until its last sequence is handed to the transport. Used on the event loop only, so there is nothing to lock.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from opd.errors import InvalidRequestError, OverloadedError


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


MIN_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a request or of a part of it: tokens through the model, and bytes of its ids and scores in memory."""

    tokens: int
    reply_bytes: int


class Reservation:
    """A share of the budget, released part by part as sequences are sent; `close`, called once, releases the rest."""

    def __init__(self, budget: "Budget", client: Client, price: Price) -> None:
        self._budget = budget
        self._client = client
        self._left = price
        self._closed = False

    def release(self, part: Price) -> None:
        """Release a part."""
        # At most what is left, so that a sequence and `close` cannot release the same share twice.
        part = Price(min(part.tokens, self._left.tokens), min(part.reply_bytes, self._left.reply_bytes))
        self._left = Price(self._left.tokens - part.tokens, self._left.reply_bytes - part.reply_bytes)
        self._budget._give_back(self._client, part)

    def close(self) -> None:
        """Release what is left.

        Raises:
            RuntimeError: if it was closed before; a double release would let in too much.
        """
        if self._closed:
            raise RuntimeError("this reservation is closed already; close it once.")
        self.release(self._left)
        self._budget._close(self._client)
        self._closed = True


class Budget:
    """The tokens and reply bytes of everything in flight on a server.

    Args:
        tokens: tokens that may be queued and running at once.
        reply_bytes: bytes of requests and scores that may be promised or held at once.
        client_share: share of both budgets that one principal may hold while it already holds some, and share of that
            share that one of the principal's names may hold likewise.

    Attributes:
        used: what is reserved.
        opened, closed: number of reservations made and closed since the start.
        freed_bytes: bytes of all reservations that were given back since the start.
    """

    def __init__(self, tokens: int, reply_bytes: int, client_share: float = 1.0) -> None:
        self.tokens = tokens
        self.reply_bytes = reply_bytes
        self.used = Price(0, 0)
        self.opened = 0
        self.closed = 0
        self.freed_bytes = 0
        self._share = client_share
        self._held: dict[str | Client, tuple[int, Price]] = {}

    def reserve(self, client: Client, price: Price, *, tokens_per_second: float) -> Reservation:
        """Reserve the price of a request.

        Args:
            client: who sent the request.
            price: the cost of the whole request.
            tokens_per_second: the engine's recent throughput, 0.0 if unknown; used to say when to retry.

        Raises:
            InvalidRequestError: if the request would not even fit into an idle server.
            OverloadedError: if there is not enough room at present.
        """
        if price.tokens > self.tokens or price.reply_bytes > self.reply_bytes:
            raise InvalidRequestError(
                f"the request needs {price.tokens} tokens and {price.reply_bytes} bytes of memory, but this server "
                f"takes at most {self.tokens} and {self.reply_bytes}; send fewer sequences at once."
            )
        # All checks come before any change, so that a refusal has nothing to undo.
        total = Price(self.tokens, self.reply_bytes)
        self._check_room(None, self.used, total, price, tokens_per_second)
        for key, share in ((client.principal, self._share), (client, self._share**2)):
            calls, held = self._held.get(key, (0, Price(0, 0)))
            # The first request of a client may exceed its share; a request larger than the share could never be served
            # else.
            if calls:
                part = Price(int(share * total.tokens), int(share * total.reply_bytes))
                self._check_room(key, held, part, price, tokens_per_second)
        for key in (client.principal, client):
            calls, held = self._held.get(key, (0, Price(0, 0)))
            self._held[key] = (calls + 1, _plus(held, price))
        self.used = _plus(self.used, price)
        self.opened += 1
        return Reservation(self, client, price)

    def _check_room(
        self, whose: str | Client | None, used: Price, total: Price, price: Price, tokens_per_second: float
    ) -> None:
        """Refuse a request that does not fit beside `used` into `total`: of a principal, of a client, or of all."""
        over = max(used.tokens + price.tokens - total.tokens, 0)
        if not over and used.reply_bytes + price.reply_bytes <= total.reply_bytes:
            return
        # At least as long as the request itself would take: room appears a batch at a time and others wait for it too,
        # so a caller that returned when just enough might be free would be refused again. All room is free once all is
        # done.
        tokens = self._until_released(whose, min(max(over, price.tokens), used.tokens))
        wait = tokens / tokens_per_second if tokens_per_second > 0 else 0.2
        wait = min(max(wait, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        usage = {
            "request_tokens": price.tokens,
            "used_tokens": used.tokens,
            "budget_tokens": total.tokens,
            "request_bytes": price.reply_bytes,
            "used_bytes": used.reply_bytes,
            "budget_bytes": total.reply_bytes,
        }
        raise OverloadedError(
            f"the server already holds {used.tokens} of at most {total.tokens} tokens and {used.reply_bytes} of at "
            f"most {total.reply_bytes} bytes of memory{'' if whose is None else ' for this client'}, so a request of "
            f"{price.tokens} tokens and {price.reply_bytes} bytes has no room; retry in {wait:.2f} s.",
            wait,
            usage,
        )

    def _until_released(self, whose: str | Client | None, tokens: int) -> int:
        """Tokens that the engine takes until it has taken `tokens` of a principal, of a client, or of all.

        By fair sharing, that is as many again of each other principal, and of each other name of the same principal, as
        far as they have them; compare `FairQueue.before`.
        """
        if whose is None:
            return tokens
        held = {key: part.tokens for key, (_, part) in self._held.items() if key != whose}
        principal, mine = whose, tokens
        if isinstance(whose, Client):
            principal = whose.principal
            names = (n for key, n in held.items() if isinstance(key, Client) and key.principal == principal)
            mine += sum(min(n, tokens) for n in names)
        return mine + sum(min(n, mine) for key, n in held.items() if isinstance(key, str) and key != principal)

    def _give_back(self, client: Client, part: Price) -> None:
        for key in (client.principal, client):
            calls, held = self._held[key]
            self._held[key] = (calls, _minus(held, part))
        self.used = _minus(self.used, part)
        self.freed_bytes += part.reply_bytes

    def _close(self, client: Client) -> None:
        for key in (client.principal, client):
            calls, held = self._held[key]
            if calls == 1:
                del self._held[key]
            else:
                self._held[key] = (calls - 1, held)
        self.closed += 1


def check_deadline(deadline: float, now: float, queued_tokens: int, tokens: int, tokens_per_second: float) -> None:
    """Refuse a request that would miss its deadline in the queue, rather than compute scores that come too late.

    An idle teacher accepts everything: its measured throughput may stem from small batches, and an attempt delays no
    other request.

    Args:
        deadline: the request's deadline, in seconds of the same clock as `now`.
        now: the current time in seconds.
        queued_tokens: tokens that are running or come before the request in the queue.
        tokens: tokens of the request.
        tokens_per_second: the engine's recent throughput; 0 if unknown.

    Raises:
        OverloadedError: if the estimated wait is more than twice the time left; the factor allows for coarse estimates.
    """
    if tokens_per_second <= 0 or queued_tokens == 0 or not math.isfinite(deadline):
        return
    wait = (queued_tokens + tokens) / tokens_per_second
    if wait > 2 * (deadline - now):
        raise OverloadedError(
            f"the request would take about {wait:.1f} s behind {queued_tokens} queued tokens, but its deadline is in "
            f"{deadline - now:.1f} s; retry later, ask another replica or allow more time.",
            min(max(wait - (deadline - now), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS),
            {"request_tokens": tokens},
        )


def _plus(a: Price, b: Price) -> Price:
    return Price(a.tokens + b.tokens, a.reply_bytes + b.reply_bytes)


def _minus(a: Price, b: Price) -> Price:
    return Price(a.tokens - b.tokens, a.reply_bytes - b.reply_bytes)
