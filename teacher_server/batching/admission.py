"""Admission control: what a request costs, whether the budget has room, and when to retry if it has none.

Tokens bound the wait for the engine, reply bytes bound the memory: a request holds its share of both from before
anything is allocated until its last sequence is handed to the transport. Used from the event loop only, so it needs no
lock.
"""

import math
from dataclasses import dataclass

from opd.errors import InvalidRequestError, OverloadedError
from teacher_server.batching.client import Client

MIN_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of a request or a part of it: tokens through the model, bytes of scores until they are sent."""

    tokens: int
    reply_bytes: int


class Reservation:
    """A share of the budget; released part by part as sequences are sent, the rest by `close`, which is called once."""

    def __init__(self, budget: "Budget", client: Client, price: Price) -> None:
        self._budget = budget
        self._client = client
        self._left = price
        self._closed = False

    def release(self, part: Price) -> None:
        """Give back a part, at most what is left."""
        # At most what is left: a sequence and `close` must not give the same share back twice.
        part = Price(min(part.tokens, self._left.tokens), min(part.reply_bytes, self._left.reply_bytes))
        self._left = Price(self._left.tokens - part.tokens, self._left.reply_bytes - part.reply_bytes)
        self._budget._give_back(self._client, part)

    def close(self) -> None:
        """Give back all that is left.

        Raises:
            RuntimeError: when it was closed before; a double release would let in too much.
        """
        if self._closed:
            raise RuntimeError("a reservation was closed twice.")
        self.release(self._left)
        self._budget._close(self._client)
        self._closed = True


class Budget:
    """Tokens and reply bytes of everything in flight on one server.

    Args:
        tokens: that may wait and run at once.
        reply_bytes: that may be promised or held at once.
        client_share: of both budgets, for one principal that already holds some; of that share, for one of its names
            that does.

    Attributes:
        used: what is reserved now.
        opened, closed: reservations made and closed since the start.
    """

    def __init__(self, tokens: int, reply_bytes: int, client_share: float = 1.0) -> None:
        self.tokens = tokens
        self.reply_bytes = reply_bytes
        self.used = Price(0, 0)
        self.opened = 0
        self.closed = 0
        self._share = client_share
        self._held: dict[str | Client, tuple[int, Price]] = {}

    def reserve(self, client: Client, price: Price, *, tokens_per_second: float) -> Reservation:
        """Reserve a request's price.

        Args:
            client: by whom it is asked for.
            price: of the whole request.
            tokens_per_second: of the engine lately, 0.0 when unknown; decides when to come back.

        Raises:
            InvalidRequestError: when the request would not fit into an idle server.
            OverloadedError: when there is no room now.
        """
        if price.tokens > self.tokens or price.reply_bytes > self.reply_bytes:
            raise InvalidRequestError(
                f"the request costs {price.tokens} tokens and {price.reply_bytes} bytes of scores, but this server "
                f"holds at most {self.tokens} and {self.reply_bytes}; send fewer sequences at once."
            )
        # All checks before anything is written down: a refusal leaves nothing to take back.
        total = Price(self.tokens, self.reply_bytes)
        self._check_room(self.used, total, price, "", tokens_per_second)
        for key, share in ((client.principal, self._share), (client, self._share**2)):
            calls, held = self._held.get(key, (0, Price(0, 0)))
            # The first request of a client may exceed its share: one larger than the share could never be served.
            if calls:
                part = Price(int(share * total.tokens), int(share * total.reply_bytes))
                self._check_room(held, part, price, " for this client", tokens_per_second)
        for key in (client.principal, client):
            calls, held = self._held.get(key, (0, Price(0, 0)))
            self._held[key] = (calls + 1, _plus(held, price))
        self.used = _plus(self.used, price)
        self.opened += 1
        return Reservation(self, client, price)

    def _check_room(self, used: Price, total: Price, price: Price, whose: str, tokens_per_second: float) -> None:
        over = max(used.tokens + price.tokens - total.tokens, 0)
        if not over and used.reply_bytes + price.reply_bytes <= total.reply_bytes:
            return
        # At least as long as the request itself takes: room comes a batch at a time, and others wait for it too, so a
        # caller who came back when just enough may be free would be refused again. When all is done there is room.
        tokens = min(max(over, price.tokens), used.tokens)
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
            f"the server holds {used.tokens} of {total.tokens} tokens and {used.reply_bytes} of {total.reply_bytes} "
            f"bytes{whose}, no room for {price.tokens} tokens; retry in {wait:.2f} s.",
            wait,
            usage,
        )

    def _give_back(self, client: Client, part: Price) -> None:
        for key in (client.principal, client):
            calls, held = self._held[key]
            self._held[key] = (calls, _minus(held, part))
        self.used = _minus(self.used, part)

    def _close(self, client: Client) -> None:
        for key in (client.principal, client):
            calls, held = self._held[key]
            if calls == 1:
                del self._held[key]
            else:
                self._held[key] = (calls - 1, held)
        self.closed += 1


def check_deadline(deadline: float, now: float, queued_tokens: int, tokens: int, tokens_per_second: float) -> None:
    """Refuse a request that would miss its deadline in the queue, rather than compute what is no longer waited for.

    An idle teacher takes everything: its rate may stem from small batches, and an attempt delays no other request.

    Args:
        deadline: of the request, seconds of the same clock as `now`.
        now: seconds.
        queued_tokens: running, or taken from the queue before it.
        tokens: of the request.
        tokens_per_second: of the engine lately, 0 when unknown.

    Raises:
        OverloadedError: when the estimate exceeds the deadline twice over; estimates are coarse.
    """
    if tokens_per_second <= 0 or queued_tokens == 0 or not math.isfinite(deadline):
        return
    wait = (queued_tokens + tokens) / tokens_per_second
    if wait > 2 * (deadline - now):
        raise OverloadedError(
            f"{queued_tokens} tokens come first, about {wait:.1f} s, but the deadline is in {deadline - now:.1f} s; "
            "retry later or elsewhere.",
            min(max(wait - (deadline - now), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS),
            {"request_tokens": tokens},
        )


def _plus(a: Price, b: Price) -> Price:
    return Price(a.tokens + b.tokens, a.reply_bytes + b.reply_bytes)


def _minus(a: Price, b: Price) -> Price:
    return Price(a.tokens - b.tokens, a.reply_bytes - b.reply_bytes)
