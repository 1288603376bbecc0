"""What is in flight: rows (`ScoreTask`), the RPCs that carry them, and this client's load on each server.

They refer to each other and are therefore in one module: a task lists its RPCs, an RPC its tasks and its server, and a
server's load its RPCs.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Set
from dataclasses import dataclass, field

from opd.errors import OpdError
from opd.fleet.scheduling.throughput import Throughput
from opd.wire.bounds import item_bytes
from opd.wire.types import PayloadSpec, ScoreItem, Scores

_RECENT_GROUPS = 32
_FIELD_BYTES = 64
_ACCEPTED_SECONDS = 2.0  # a server refuses before it computes, so it has accepted an RPC that it has had for this long
_NEVER = float("inf")


@dataclass(eq=False, slots=True)
class ScoreTask:
    """A row that is to be scored exactly once.

    Attributes:
        number: order of submission, unique in the fleet.
        teacher: name of the teacher.
        item, spec, temperature: what to score, and as which payload.
        deliver: called once, with the scores or the error.
        group: name shared by the rows of a prompt, which keeps them together; "" for none.
        submitted: time of submission on the fleet's clock, in seconds.
        deadline: deadline on the fleet's clock, in seconds; inf for none.
        trace: metadata of the caller's span.
        tokens: number of prompt and response tokens, which is the cost of the row.
        size: most bytes that the row takes in a request.
        batch_key: rows with equal keys (payload, temperature) may travel in one RPC.
        failures: number of failed attempts.
        avoid: servers where an attempt failed; others are preferred.
        barred: servers where it must not go.
        cross_score: whether it was chosen to be scored by two replicas.
        is_check: whether it only checks the scores of its twin.
        twin: the task for the same row that must not share a server with it; None for none.
        answered_by: address of the server whose scores it got; "" before.
        rpcs: the RPCs that carry the row at present: one, or two if it is hedged.
        hedged: whether a second RPC was started.
        moves: number of times it was taken back from a server that stalled.
        refused_since: time of the first of the refusals by busy servers that its last attempts were, None if the last
            attempt was not refused.
        done: whether a result, an error or a cancellation was delivered.
    """

    number: int
    teacher: str
    item: ScoreItem
    spec: PayloadSpec
    temperature: float = 1.0
    deliver: Callable[[Scores | OpdError], None] = lambda outcome: None
    group: str = ""
    submitted: float = 0.0
    deadline: float = _NEVER
    trace: tuple[tuple[str, str], ...] = ()
    tokens: int = field(init=False)
    size: int = field(init=False)
    batch_key: Hashable = field(init=False)
    failures: int = 0
    avoid: set[str] = field(default_factory=set)
    barred: frozenset[str] = frozenset()
    cross_score: bool = False
    is_check: bool = False
    twin: "ScoreTask | None" = None
    answered_by: str = ""
    rpcs: list["Rpc"] = field(default_factory=list)
    hedged: bool = False
    moves: int = 0
    refused_since: float | None = None
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = len(self.item.token_ids)
        self.size = item_bytes(self.item) + _FIELD_BYTES
        self.batch_key = (self.spec, self.temperature)

    def accepts(self, address: str, serving: Set[str]) -> bool:
        """Whether it may go to a server; to a server where it failed only if all others that serve it failed too."""
        barred = self.barred_now()
        if address in barred:
            return False
        # If every server has failed it once, the failure may be the row's own; another attempt is better than none.
        return address not in self.avoid or serving - barred <= self.avoid

    def barred_now(self) -> Set[str]:
        """Servers where it must not go: those that are barred, and those that have, or answered, its twin."""
        if self.twin is None:
            return self.barred
        return self.barred | {rpc.server.address for rpc in self.twin.rpcs} | {self.twin.answered_by}


@dataclass(eq=False, slots=True)
class Rpc:
    """An RPC: rows for one teacher, with one payload, on one server.

    Attributes:
        number: order of dispatch.
        server: the server that it was sent to.
        teacher: name of the teacher.
        tasks: the rows, in the order of the request.
        waiting: numbers of the rows that are not answered yet.
        started: time of dispatch on the fleet's clock, in seconds.
        expected: seconds after which it should be done, from the server's throughput and the work ahead of it.
        hedge: whether it is a second attempt.
    """

    number: int
    server: "ServerLoad"
    teacher: str
    tasks: list[ScoreTask]
    waiting: set[int]
    started: float
    expected: float
    hedge: bool = False

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that are not answered yet."""
        return sum(task.tokens for task in self.tasks if task.number in self.waiting)


class ServerLoad:
    """What this client has in flight on one server, and how fast the server processes it.

    Attributes:
        address: address of the server.
        teachers: names of the teachers that may be asked for here: those with a usable replica.
        rpcs: RPCs in flight, by number.
        in_flight_tokens, in_flight_rows: what has been sent and is not answered.
        window: tokens that may be in flight, apart from the first two rows, which always may.
        last_sent: when an RPC was last sent.
        paused_until: time before which nothing new is sent, because the server pushed back.
        refused_since: time of the first pushback since the last answer; inf if there was none.
        refusals: round trips since the last answer in which the server pushed back.
        throughput: the server's speed as measured by this client.
    """

    def __init__(self, address: str, limit_tokens: int) -> None:
        self.address = address
        self.teachers: set[str] = set()
        self.rpcs: dict[int, Rpc] = {}
        self.in_flight_tokens = 0
        self.in_flight_rows = 0
        self.window = 0.0
        self.last_sent = float("-inf")
        self.paused_until = 0.0
        self.refused_since = _NEVER
        self.refusals = 0
        self.throughput = Throughput()
        self._limit = limit_tokens
        self._halved_at = float("-inf")
        self._first_rows = 2  # in flight whatever the window: one is computed while the next one travels
        self._oldest: float | None = None  # tokens of the oldest unanswered row; None if it must be looked up
        self._groups: OrderedDict[tuple[str, str], None] = OrderedDict()

    def open(self, now: float) -> bool:
        """Whether another row may be sent now."""
        if now < self.paused_until:
            return False
        return self.in_flight_rows < self._first_rows or self.in_flight_tokens < self.window

    def room(self) -> float:
        """Tokens left in the window."""
        return max(0.0, self.window - self.in_flight_tokens)

    def rows_of(self, teacher: str) -> int:
        """Number of a teacher's rows that have been sent and are not answered."""
        return sum(len(rpc.waiting) for rpc in self.rpcs.values() if rpc.teacher == teacher)

    def ahead(self, now: float, speed: float) -> float:
        """Tokens that are not processed yet: those in flight, minus what `speed` allows since the last answer.

        At most the oldest unanswered row counts as processed, so that a stalled server does not seem to make progress.
        """
        if not self.rpcs:
            return 0.0
        if self._oldest is None:  # cached, because `ahead` is called far more often than rows come and go
            waiting = (task.tokens for rpc in self.rpcs.values() for task in rpc.tasks if task.number in rpc.waiting)
            self._oldest = float(next(waiting, 0))
        return self.in_flight_tokens - min(speed * self.throughput.since_answer(now), self._oldest)

    def sent(self, rpc: Rpc, now: float) -> None:
        """Account for an RPC that is sent now."""
        self.rpcs[rpc.number] = rpc
        self._oldest = None
        self.last_sent = now
        self.in_flight_rows += len(rpc.tasks)
        self.in_flight_tokens += sum(task.tokens for task in rpc.tasks)
        self.throughput.busy(now)
        for task in rpc.tasks:
            if task.group:
                self._groups[(task.teacher, task.group)] = None
                # Most recent last, whether it is new or not, so that the oldest group is evicted.
                self._groups.move_to_end((task.teacher, task.group))
        while len(self._groups) > _RECENT_GROUPS:
            self._groups.popitem(last=False)

    def answered(self, tokens: int, now: float) -> None:
        """A row of `tokens` tokens was answered: release it, measure the speed, and widen the window by twice as much.

        This is TCP's slow start: as many tokens as were answered may be sent again, and as many on top, so the window
        doubles every round trip.
        """
        self.throughput.answered(tokens, now)
        # Only answers widen the window; otherwise a server that accepts rows and never answers would get more and more.
        self.window = min(float(self._limit), self.window + 2 * tokens)
        self._first_rows = 2
        self.refused_since = _NEVER
        self.refusals = 0
        self._free(tokens)

    def released(self, tokens: int, now: float) -> None:
        """A row of `tokens` tokens left without an answer; the time that it took counts."""
        # Nothing was answered in that time, so the server appears slower, as it should.
        self.throughput.answered(0, now)
        self._free(tokens)

    def _free(self, tokens: int) -> None:
        self._oldest = None
        self.in_flight_rows -= 1
        self.in_flight_tokens -= tokens
        if self.in_flight_rows == 0:
            self.throughput.idle()

    def pushed_back(self, now: float, until: float, sent: float) -> None:
        """The server refused an RPC `sent` at that time: pause until `until`, then send half as much."""
        self.paused_until = max(self.paused_until, until)
        self.refused_since = min(self.refused_since, now)
        if sent > self._halved_at:  # once per round trip, as in TCP: other RPCs were in flight at the last halving
            self._halved_at = now
            self.window /= 2
            self.refusals += 1
        self._first_rows = 1

    def refuses(self, now: float) -> bool:
        """Whether the server has lately done nothing but refuse RPCs.

        That is not so while it works on an RPC that it accepted before, nor from two seconds after its pause on: an RPC
        that it has not refused by then is accepted.
        """
        if now >= self.paused_until + _ACCEPTED_SECONDS or self.refused_since == _NEVER:
            return False
        return all(rpc.started >= self.refused_since for rpc in self.rpcs.values())

    def reset(self) -> None:
        """Start slowly again, after a failure or a restart."""
        self.window = 0.0
        self._first_rows = 2
        self.throughput.forget()

    def restarted(self) -> None:
        """Another process answers at this address: reset, and end the pause that the old one asked for."""
        self.reset()
        self.paused_until = 0.0
        self.refused_since = _NEVER
        self.refusals = 0

    def recent_groups(self, teacher: str) -> list[str]:
        """Groups of `teacher` that were recently sent here, most recent first."""
        return [group for name, group in reversed(self._groups) if name == teacher]
