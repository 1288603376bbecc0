"""Cross-scoring: a small share of the live rows is scored by a second replica before their scores are delivered.

A replica could pass every check on rows that look like checks and score the others with another model. A live row that
is scored twice looks like any other to both servers. If the two results are further apart than the tolerance, a third
replica decides and the odd one out is rejected. If no third replica can decide, all that disagree are rejected and the
row waits, as in an outage, for a replica that agrees with its pool: disputed scores are never delivered.

Which rows are chosen depends on the row and the seed only, so neither on timing nor on failures, and no server can
foresee it without the seed. The scores that are delivered are those of the row's own RPC in either case.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from opd.errors import OpdError
from opd.fleet.membership.answers import answer_distance
from opd.fleet.scheduling.in_flight import ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import HealthSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import Head, PayloadKind, Scores

log = logging.getLogger("opd.fleet")


class RowDesk(Protocol):
    """What cross-scoring needs from the dispatcher."""

    def submit_check(self, task: ScoreTask) -> None:
        """Send a check, whose `deliver` gets the outcome."""
        ...

    def withdraw_check(self, task: ScoreTask) -> None:
        """Take a check back, whose `deliver` is then not called any more."""
        ...

    def deliver_scores(self, task: ScoreTask, scores: Scores) -> None:
        """Deliver a row's scores."""
        ...

    def ask_again(self, task: ScoreTask) -> None:
        """Queue a row again, as if it had not been answered."""
        ...

    def trusts(self, address: str, teacher: str) -> bool:
        """Whether a replica has not been rejected."""
        ...

    def reject(self, address: str, teacher: str, reason: str) -> None:
        """Take a replica out of service until it changes."""
        ...


@dataclass(eq=False, slots=True)
class _Check:
    """A live row that is scored twice: its results so far by server, and the task that fetches another one.

    `rejected` are servers that were rejected after they had answered; a new process there does not make their scores
    trustworthy.
    """

    row: ScoreTask
    answers: dict[str, Scores] = field(default_factory=dict)
    rejected: set[str] = field(default_factory=set)
    other: ScoreTask | None = None
    judging: asyncio.Task[None] | None = None


class CrossScorer:
    """Compares the scores that two replicas give to chosen rows.

    Args:
        settings: the share of rows, the seed and the tolerance.
        scheduler: knows where a teacher may be asked for.
        counters: counts the checks.
        desk: sends, delivers and rejects.
        head_of: fetches a teacher's head, through which hidden states are compared.
    """

    def __init__(
        self,
        settings: HealthSettings,
        scheduler: Scheduler,
        counters: FleetCounters,
        desk: RowDesk,
        head_of: Callable[[str], Awaitable[Head]],
    ) -> None:
        self._tolerance = settings.agreement_nats
        self._threshold = int(settings.cross_score_share * 2.0**64)
        seed = settings.check_seed
        self._key = secrets.token_bytes(16) if seed is None else str(seed).encode()
        self._scheduler = scheduler
        self._counters = counters
        self._desk = desk
        self._head_of = head_of
        self._open: dict[int, _Check] = {}

    def begin(self, row: ScoreTask) -> None:
        """Choose whether a submitted row is scored twice, and if there are two replicas, send it a second time."""
        row.cross_score = bool(self._threshold) and self._is_chosen(row)
        if row.cross_score and len(self._scheduler.serving(row.teacher)) > 1:
            check = self._open[row.number] = _Check(row)
            self._send_another(check)

    def hold(self, row: ScoreTask, scores: Scores) -> bool:
        """Take a row's scores; returns whether they are held, to be delivered or asked for again later."""
        check = self._open.get(row.number)
        # A chosen row that found a single replica when it was submitted is still checked if there is another by now.
        if check is None and row.cross_score and self._others(row, {row.answered_by}):
            check = self._open[row.number] = _Check(row)
        if check is None:
            return False
        check.answers[row.answered_by] = scores
        self._consider(check)
        return True

    def forget(self, row: ScoreTask) -> None:
        """Drop the check of a row that is done: delivered, failed or cancelled."""
        check = self._open.pop(row.number, None)
        if check is not None:
            self._take_back(check)
            if check.judging is not None:
                check.judging.cancel()

    def give_way(self, row: ScoreTask) -> None:
        """Drop the check of a row whose RPC failed, so that the row may go to any server, the check's included."""
        check = self._open.get(row.number)
        if check is not None:
            self._abandon(check)

    def sweep(self, overdue: Callable[[ScoreTask], bool]) -> None:
        """End the checks that delay their rows: there is no server for one of the two, or one is overdue.

        A check is a safeguard and no reason to wait: it must not delay a step by more than a hedge would.

        Args:
            overdue: whether a task has been in flight for far longer than expected.
        """
        for check in list(self._open.values()):
            row, other = check.row, check.other
            if other is None:
                # The check was faster than the row, as a hedge might have been.
                if not row.answered_by and overdue(row):
                    self._without_another(check)
            elif row.answered_by:
                if self._stuck(other) or overdue(other):
                    self._take_back(check)
                    self._without_another(check)
            elif self._stuck(other) or self._stuck(row):
                self._abandon(check)

    def _is_chosen(self, row: ScoreTask) -> bool:
        # A keyed hash: uniform over rows, the same after a resume, and unpredictable without the key.
        digest = hashlib.blake2b(row.item.token_ids.tobytes(), digest_size=8, key=self._key)
        digest.update(f"{row.teacher} {row.item.prompt_length} {row.spec} {row.temperature}".encode())
        return int.from_bytes(digest.digest(), "little") < self._threshold

    def _others(self, row: ScoreTask, asked: Collection[str]) -> bool:
        """Whether there is a replica that was not asked yet and may get rows."""
        return any(server.address not in asked for server in self._scheduler.serving(row.teacher))

    def _stuck(self, task: ScoreTask) -> bool:
        """Whether a task waits without a server for it: two tasks in flight for one row need two servers."""
        if task.rpcs:
            return False
        serving = {server.address for server in self._scheduler.serving(task.teacher)}
        answered_by = task.twin.answered_by if task.twin is not None else ""
        return serving <= task.barred | {answered_by} or (len(serving) < 2 and not answered_by)

    def _send_another(self, check: _Check) -> None:
        row = check.row
        other = check.other = ScoreTask(
            number=-1,  # set by `submit_check`
            teacher=row.teacher,
            item=row.item,
            spec=row.spec,
            temperature=row.temperature,
            group=row.group,
            deadline=row.deadline,
            trace=row.trace,
            barred=frozenset(check.answers),
            twin=row,
            is_check=True,
        )
        row.twin = other  # each bars the other's server, see `ScoreTask.barred_now`
        other.deliver = lambda outcome: self._answered(check, other, outcome)
        self._desk.submit_check(other)

    def _take_back(self, check: _Check) -> None:
        other, check.other, check.row.twin = check.other, None, None
        if other is not None:
            self._desk.withdraw_check(other)

    def _answered(self, check: _Check, other: ScoreTask, outcome: Scores | OpdError) -> None:
        check.other = check.row.twin = None
        # The row was delivered, failed or given up meanwhile.
        if check.row.number not in self._open:
            return
        if isinstance(outcome, OpdError):
            if check.row.answered_by:
                self._without_another(check)
            else:
                self._abandon(check)
            return
        self._counters.checked_rows += 1
        self._counters.checked_tokens += other.tokens
        check.answers[other.answered_by] = outcome
        # While the row is in flight, it must not go to the server that answered its check.
        check.row.barred |= {other.answered_by}
        self._consider(check)

    def _consider(self, check: _Check) -> None:
        """Judge, once both the row and its check are answered."""
        row = check.row
        if not row.answered_by or check.other is not None:
            return
        if len(check.answers) == 1:
            self._send_another(check)
        elif len({scores.weights_hash for scores in check.answers.values()}) > 1:
            # The teacher got other weights meanwhile, so there is nothing to compare.
            self._desk.deliver_scores(row, check.answers[row.answered_by])
        elif row.spec.kind is PayloadKind.HIDDEN:
            check.judging = asyncio.get_running_loop().create_task(self._judge_hidden(check))
        else:
            self._judge(check, None)

    async def _judge_hidden(self, check: _Check) -> None:
        head: Head | None = None
        try:
            head = await self._head_of(check.row.teacher)
        except OpdError as error:
            log.warning("two replicas' scores of a row could not be compared: %s", error)
        check.judging = None
        if head is None:
            self._desk.deliver_scores(check.row, check.answers[check.row.answered_by])
        else:
            self._judge(check, head)

    def _judge(self, check: _Check, head: Head | None) -> None:
        """Deliver what two replicas agree on and reject the others; if none agree, ask a further replica."""
        row, answers = check.row, self._trusted(check)
        gaps = {
            frozenset(pair): answer_distance(row.item, row.spec, answers[pair[0]], answers[pair[1]], head)
            for pair in combinations(answers, 2)
        }
        agreeing = {one for pair, gap in gaps.items() if gap <= self._tolerance for one in pair}
        if agreeing:
            names = " and ".join(sorted(agreeing))
            for one in answers.keys() - agreeing:
                least = min(gap for pair, gap in gaps.items() if one in pair)
                self._reject(row, one, f" by {least:.3g} nats", names)
            # The row's own scores if they stand, so that what a run trains on does not depend on which rows were
            # checked.
            self._desk.deliver_scores(row, next(answers[one] for one in (row.answered_by, *answers) if one in agreeing))
        elif self._others(row, check.answers.keys()):
            self._send_another(check)
        else:
            self._without_another(check)

    def _trusted(self, check: _Check) -> dict[str, Scores]:
        teacher = check.row.teacher
        return {
            one: scores
            for one, scores in check.answers.items()
            if one not in check.rejected and self._desk.trusts(one, teacher)
        }

    def _without_another(self, check: _Check) -> None:
        """Settle a check without a further replica: a single trusted result is delivered, disputed ones are not."""
        row, answers = check.row, self._trusted(check)
        if len(answers) == 1:
            self._desk.deliver_scores(row, next(iter(answers.values())))
        elif not row.answered_by:
            self._abandon(check)
        else:
            # Removed before the row is queued again, so that `ask_again` can begin a new check.
            self._open.pop(row.number)
            for one in answers:
                others = " and ".join(other for other in answers if other != one)
                self._reject(row, one, "", f"{others}, and no other replica could decide")
            self._desk.ask_again(row)

    def _abandon(self, check: _Check) -> None:
        """Give a check up: the row is scored once, like any other."""
        self._open.pop(check.row.number)
        self._take_back(check)
        check.row.barred = frozenset()

    def _reject(self, row: ScoreTask, address: str, size: str, others: str) -> None:
        reason = f"its scores of a row differ{size} from those of {others}; the tolerance is {self._tolerance:.3g} nats"
        for check in self._open.values():
            if check.row.teacher == row.teacher and address in check.answers:
                check.rejected.add(address)
        self._desk.reject(address, row.teacher, reason)
