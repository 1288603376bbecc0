"""A row on its way to a teacher, and a call that carries rows."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.fleet.lane import Lane


@dataclass(eq=False, slots=True)
class Job:
    """One row to score, exactly once.

    Attributes:
        number: order of submission, unique in the fleet.
        teacher: name of the teacher.
        tokens: prompt and response tokens, the cost of the row.
        batch_key: rows with equal keys (payload, temperature) may travel in one call.
        group: rows of one prompt share a group, which keeps them together; "" for none.
        submitted: seconds of the fleet's clock.
        deadline: seconds of the fleet's clock, inf for none.
        cargo: what the owner of the scheduler needs to send the row and to deliver its result.
        failures: attempts that failed.
        avoid: servers where an attempt failed; others are preferred.
        calls: calls that carry the row now: one, or two when it is hedged.
        hedged: whether a second call was started.
        moves: how often it was taken back from a server that stalled.
        done: whether a result, an error or a cancellation was delivered.
    """

    number: int
    teacher: str
    tokens: int
    batch_key: Hashable = None
    group: str = ""
    submitted: float = 0.0
    deadline: float = float("inf")
    cargo: Any = None
    failures: int = 0
    avoid: set[str] = field(default_factory=set)
    calls: list["Call"] = field(default_factory=list)
    hedged: bool = False
    moves: int = 0
    done: bool = False


@dataclass(eq=False, slots=True)
class Call:
    """One RPC: rows of one teacher with one payload on one server.

    Attributes:
        number: order of dispatch.
        lane: the server.
        teacher: name of the teacher.
        jobs: the rows in the order of the request.
        waiting: numbers of the rows that have not been answered.
        started: seconds of the fleet's clock.
        expected: seconds after which it should be done, from the server's measured speed and what is before it.
        hedge: whether it is a second attempt.
    """

    number: int
    lane: "Lane"
    teacher: str
    jobs: list[Job]
    waiting: set[int]
    started: float
    expected: float
    hedge: bool = False

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the rows that have not been answered."""
        return sum(job.tokens for job in self.jobs if job.number in self.waiting)
