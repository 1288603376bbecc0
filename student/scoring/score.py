"""Scores rows: routes each to its teacher, sends the requests that the objective needs, verifies, and waits.

A row is submitted as soon as its rollout finishes, so the fleet works while the student still samples; short rows are
sent together. Models in this process score rows in batches when the rows are collected, while the fleet continues.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from opd.errors import ConfigError
from opd.fleet.membership.outage import OutageHooks
from opd.fleet.source import ScoreSource
from opd.heads import OutputHead
from opd.tasks.source import Labels
from opd.wire.spans import put_back
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.needs import STUDENT, TEACHER, Needs, SignalNeed
from student.data.row import Row, SignalKey
from student.scoring.arriving import Arriving, Call
from student.scoring.contexts import Contexts
from student.scoring.local import LocalModels
from student.scoring.routing import mix_scores
from student.scoring.stops import StopMap
from student.scoring.targets import Target, Targets
from student.scoring.verify import Verification
from student.settings.teachers import TeacherSettings

if TYPE_CHECKING:
    from student.scoring.rewards.rounds import StepRewards

_SENT_TOKENS = 512
"""Tokens to collect before a call to the fleet. A call costs both sides milliseconds whatever it carries, so rows of a
dozen tokens sent one by one would keep a server busy with calls. Longer rows are sent as they end."""


class Scorer:
    """Collects the signals of rows.

    Args:
        fleet: the client of the served models; None if no term needs any.
        settings: the recipe's `teachers` group.
        needs: what the terms need.
        verification: judges answers if verdicts are needed.
        device: the device for heads of hidden payloads.
        known: served models that the handshake has checked; None for all.
        local: the models in this process; None if no term needs any.
        contexts: prompts that models read in place of a row's prompt; None if all read the prompt.
        stops: maps the stop tokens of served models onto the student's; None to leave them as they are.
        rewards: makes the rewards of a batch that comes in one piece; None without rewards.

    Attributes:
        hooks: what to call, in the waiting thread, while a teacher is away.
    """

    def __init__(
        self,
        fleet: ScoreSource | None,
        settings: TeacherSettings | None,
        needs: Needs,
        verification: Verification,
        device: torch.device,
        *,
        known: Collection[str] | None = None,
        local: LocalModels | None = None,
        contexts: Contexts | None = None,
        stops: StopMap | None = None,
        rewards: Callable[[], "StepRewards"] | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self.needs = needs
        self._verification, self._rewards = verification, rewards
        self._device = device
        self._local, self._contexts = local, contexts
        # Without rewards, as in evaluations, there are no outcomes, and models read the student's prompt.
        self._late = contexts.late if contexts is not None and needs.reward else frozenset()
        self._stops = stops or StopMap((), {})
        self._targets = Targets(settings, needs, fleet.teachers() if fleet is not None else (), known)
        self._heads: dict[str, OutputHead] = {}
        # By id(), because replayed rows may share a key; entries are removed when a row is collected.
        self._pending: dict[int, list[Call]] = {}
        self._held: list[Call] = []  # calls that are not sent yet
        self._holding = threading.Lock()  # rows that are sampled ahead are submitted by another thread
        self.hooks = OutageHooks()

    @property
    def reads_locally(self) -> bool:
        """Whether signals may come from models in this process."""
        return self._local is not None and bool(self._local.models)

    def teachers(self, labels: Labels) -> set[str]:
        """Every value of `row.teacher` for prompts with these pairs of (teacher, domain)."""
        return self._targets.names(labels)

    def submit(self, row: Row) -> None:
        """Start judging and scoring a row; returns at once."""
        self.verify(row)
        self.ask(row)

    def verify(self, row: Row) -> None:
        """Start judging a row; returns at once."""
        if self.needs.reward == "verdict":
            self._verification.submit(row)

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form in which equal answers compare equal; None if there is none."""
        return self._verification.extract(rows)

    def ask(self, row: Row) -> None:
        """Start scoring a row; returns at once. Requests with contexts made from outcomes wait until it is judged."""
        if self._contexts is not None:
            self._contexts.fill(row)
        self._send_all(row, late=False)

    def _ask_late(self, rows: Sequence[Row], rewards: "StepRewards | None") -> None:
        """Ask the models whose contexts are made from outcomes."""
        if self._contexts is None or rewards is None:
            return
        self._contexts.fill_late(rows, rewards.group)
        for row in rows:
            self._send_all(row, late=True)
            # A role without a context for this row reads the student's prompt, because every row of a micro-batch needs
            # values of every role; the terms of that role skip the row.
            asked = self._pending[id(row)]
            row.unread = frozenset(call.need.role for call in asked if call.reads not in row.contexts)

    def _send_all(self, row: Row, *, late: bool) -> None:
        calls = [call for call in self._calls(row) if (call.reads in self._late) == late]
        self._pending[id(row)] = calls
        # What is read in process gets its answer when the row is collected, with many others.
        self._hold([call for call in calls if not call.target.local])

    def _hold(self, calls: Sequence[Call]) -> None:
        """Send calls to the fleet together with waiting ones, once there are enough tokens."""
        if not calls:
            return
        if self._fleet is None:
            raise ConfigError(f"model {calls[0].target.model!r} is not served; set teachers.endpoints.")
        with self._holding:
            self._held += calls
            if sum(len(call.item.token_ids) for call in self._held) >= _SENT_TOKENS:
                self._send_held()

    def flush(self) -> None:
        """Send all waiting calls, because no further rows are coming soon."""
        with self._holding:
            self._send_held()

    def _send_held(self) -> None:
        """Send all waiting calls, one batch per model and payload; the caller holds the lock."""
        held, self._held = self._held, []
        alike: dict[tuple[str, PayloadSpec, float], list[Call]] = {}
        for call in held:
            alike.setdefault((call.target.model, call.spec, call.need.level), []).append(call)
        for (model, spec, level), calls in alike.items():
            items, groups = [call.item for call in calls], [call.row.key.group for call in calls]
            assert self._fleet is not None
            sent = self._fleet.submit_many(model, items, spec, temperature=level, groups=groups)
            for call, future in zip(calls, sent, strict=True):
                call.future = future

    def _calls(self, row: Row) -> Iterator[Call]:
        """Everything that is asked about a row."""
        for need, target, reads in self._readers(row):
            # Models in this process score all positions, because skipping some saves neither bytes nor a projection.
            gather, own = need.spec.kind is PayloadKind.GATHER, not target.local
            for item, first in row.asked(gather=gather, role=reads, own=own):
                spec, asked = self._stops.ask(target.model, need.spec, item)
                yield Call((target.role, need.spec.kind), target, need, reads, spec, asked, first, row)

    def _readers(self, row: Row) -> Iterator[tuple[SignalNeed, Target, str]]:
        """Which model reads a row for which need, and the name of the context that it reads."""
        parts = self._targets.route(row)
        for need in self.needs.signals:
            for target in self._targets.of(need.role, row, parts):
                # A teacher may have its own context, kept under its name; otherwise it reads that of all teachers, kept
                # under the role.
                own = target.model in row.contexts or target.model in self._late
                yield need, target, target.model if need.role == TEACHER and own else need.role

    def positions(self, rows: Sequence[Row]) -> dict[str, int]:
        """Prompt and response positions in the calls for `rows`, by role; each teacher of a row counts separately.

        Positions read by models in this process count as role "local".
        """
        found: dict[str, int] = {}
        for row in rows:
            for need, target, reads in self._readers(row):
                role = "local" if target.local else need.role
                found[role] = found.get(role, 0) + row.asked_positions(role=reads, own=not target.local)
        return found

    def judge(
        self, rows: Sequence[Row], rewards: "StepRewards | None" = None, *, poll: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until every row has its verdict, if verdicts are needed; then reward the rows.

        Args:
            rows: rows that were given to `submit` or `verify`.
            rewards: the rewards of the step, if rows come in rounds.
            poll: see `collect`.
        """
        if self.needs.reward == "verdict":
            self._verification.collect(rows, poll=poll)
        rewards = self._begun(rewards)
        if self.needs.reward and rewards is not None:
            rewards(rows)

    def collect(
        self,
        rows: Sequence[Row],
        rewards: "StepRewards | None" = None,
        *,
        judged: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> float:
        """Wait until every row has its signals and, unless `judged`, its verdict and reward.

        Args:
            rows: rows that were given to `submit` or `ask`.
            rewards: the rewards of the step, if rows come in rounds.
            judged: whether the rows already have their verdicts and rewards.
            poll: called about twice a second while waiting, and before each batch that is scored in this process; may
                raise to give up, which cancels all calls.

        Returns:
            Seconds spent waiting for the fleet.
        """
        rewards = self._begun(rewards)
        waited = self._answer(rows, poll)
        # Judged after the models have answered, because a reward may read their signals.
        if not judged:
            self.judge(rows, rewards, poll=poll)
        if self._late:
            self._ask_late(rows, rewards)
            waited += self._answer(rows, poll)
        return waited

    def _begun(self, rewards: "StepRewards | None") -> "StepRewards | None":
        return self._rewards() if rewards is None and self._rewards is not None else rewards

    def _answer(self, rows: Sequence[Row], poll: Callable[[], None]) -> float:
        """Wait for all answers about `rows`; returns the seconds spent waiting for the fleet."""
        arriving = self.begin(rows, poll=poll)
        try:
            arriving.wait(rows, poll)
        finally:
            arriving.close()
        return arriving.waited

    def begin(self, rows: Sequence[Row], *, poll: Callable[[], None] = lambda: None) -> Arriving:
        """The outstanding answers about `rows`, for a caller that waits for some rows before others.

        Args:
            rows: rows that were given to `submit` or `ask`.
            poll: see `collect`. All batches of models in this process are scored within this call.
        """
        calls = [(row, self._pending.pop(id(row), [])) for row in rows]
        arriving = Arriving(calls, self._keep, self._fleet, self._settings, self.hooks)
        try:
            self.flush()
            # First score in this process, while the fleet works on what it was sent during the rollout.
            self._read([call for _, mine in calls for call in mine], poll)
        except BaseException:
            arriving.close()
            raise
        return arriving

    def reread(self, rows: Sequence[Row]) -> dict[str, int]:
        """Read what the terms want of role "student" again, with the present weights; returns positions read."""
        calls = [(row, [call for call in self._calls(row) if call.need.role == STUDENT]) for row in rows]
        everything = [call for _, mine in calls for call in mine]
        self._read(everything, lambda: None)
        for row, mine in calls:
            self._keep(row, mine)
        return {"local": sum(len(call.item.token_ids) for call in everything)}

    def _read(self, calls: Sequence[Call], poll: Callable[[], None]) -> None:
        """Answer the calls to models in process."""
        if self._local is None:
            return
        # Iterate over needs and not over calls, because ranks of a sharded student must read equally often.
        for need in self.needs.signals:
            for model in self._local.models:
                mine = [call for call in calls if call.need == need and call.reads_here(model)]
                level = self._local.temperature if need.temperature is None else need.temperature
                found = self._local.score(
                    model,
                    [call.item for call in mine],
                    need.spec,
                    rows=[call.row for call in mine],
                    temperature=level,
                    poll=poll,
                )
                for call, scores in zip(mine, found, strict=True):
                    call.here = scores

    def _keep(self, row: Row, calls: Sequence[Call]) -> None:
        """Put the answers into `row.signals`, mixing those of weighted teachers."""
        windows: dict[tuple[SignalKey, Target], list[tuple[Scores, ScoreItem, int]]] = {}
        for call in calls:
            scores = self._stops.apply(call.target.model, call.need.spec, call.item, call.answer)
            windows.setdefault((call.key, call.target), []).append((scores, call.item, call.first))
        answers: dict[SignalKey, list[tuple[Scores, float]]] = {}
        for (key, target), found in windows.items():
            ids = row.candidates if key[1] is PayloadKind.GATHER else None
            answers.setdefault(key, []).append((put_back(found, row.length, ids), target.weight))
        for key, parts in answers.items():
            row.signals[key] = parts[0][0] if len(parts) == 1 else mix_scores(parts)

    def fetch_heads(self, rows: Sequence[Row]) -> None:
        """Fetch the output heads for the hidden states of scored rows."""
        hidden = {(role, row.teacher): row for row in rows for role, kind in row.signals if kind is PayloadKind.HIDDEN}
        for (role, _), row in hidden.items():  # once each: the fleet is asked, though it fetches no head twice
            self.head_of(role, row)

    def head_of(self, role: str, row: Row) -> OutputHead:
        """The head of the model that `role` means for `row`, float32 on the device, fetched once."""
        target = self._targets.model_of(role, row)
        name = target.model
        if target.local and self._local is not None:
            return self._local.head(name)
        if self._fleet is None:
            raise ConfigError("hidden payloads need served models; set teachers.endpoints.")
        head = self._fleet.head(name)
        key = f"{name}/{head.hash}"
        found = self._heads.get(key)
        if found is None:
            found = OutputHead.received(head, self._device)
            # The dict is replaced rather than changed, because a probe reads it in its own thread. Older heads of the
            # same model are dropped, because its weights were updated.
            others = {k: v for k, v in self._heads.items() if not k.startswith(f"{name}/")}
            self._heads = {**others, key: found}
        return found
