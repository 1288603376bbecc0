"""Scores rows: sends the requests that the objective needs, has answers judged and rewarded, and waits.

    ask(row)      as soon as its rollout finishes, so the fleet works while the student still samples
    wait(rows)    until each has its signals, its verdict and its reward

Short rows are sent together. Models in this process score rows in batches when the rows are waited for, while the fleet
continues. A caller that learns from some rows before others `begin`s to wait and lets rows `arrive`.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from opd.errors import ConfigError
from opd.fleet.membership.outage import OutageHooks, OutageWatch
from opd.fleet.source import ScoreSource
from opd.heads import OutputHead
from opd.tasks.source import Labels
from opd.wire.types import PayloadKind, PayloadSpec, Scores
from student.data.needs import STUDENT, Needs
from student.data.row import Row
from student.scoring.contexts import Contexts
from student.scoring.local import LocalModels
from student.scoring.requests import Call, Requests
from student.scoring.stops import StopMap
from student.scoring.translate import Translator
from student.scoring.verify import Verification
from student.settings.teachers import TeacherSettings

if TYPE_CHECKING:
    from student.scoring.rewards.rounds import StepRewards

_SENT_TOKENS = 512
"""Tokens to collect before a call to the fleet. A call costs both sides milliseconds whatever it carries, so rows of a
dozen tokens sent one by one would keep a server busy with calls. Longer rows are sent as they end."""
_POLL_SECONDS = 0.5


def _no_poll() -> None:
    """Poll nothing."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A call about a row; `answer` is None until the call is sent, or read by a model in this process."""

    row: Row
    call: Call
    answer: Future[Scores] | None = None


class Scoring:
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
        translators: translate rows for teachers that have another tokenizer, by teacher.
        rewards: makes the rewards of a batch that comes in one piece; None without rewards.
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
        translators: Mapping[str, Translator] | None = None,
        rewards: Callable[[], "StepRewards"] | None = None,
        hooks: OutageHooks | None = None,
    ) -> None:
        self._fleet, self.needs = fleet, needs
        self._verification, self._rewards = verification, rewards
        self._device = device
        self._local, self._contexts = local, contexts
        self._translators = translators or {}
        # Without rewards, as in evaluations, there are no outcomes, and models read the student's prompt.
        self._late = contexts.late if contexts is not None and needs.reward else frozenset()
        served = fleet.teachers() if fleet is not None else ()
        self._requests = Requests(settings, needs, served, known=known, stops=stops, late=self._late)
        self.hooks = hooks or OutageHooks()
        self._watch: OutageWatch | None = None
        if fleet is not None and settings is not None:
            self._watch = OutageWatch(settings.fleet.outage, self.hooks)
        self._heads: dict[str, OutputHead] = {}
        # By id() of `row.signals`, into which the answers go: replayed rows may share a key, and a copy that a method
        # makes of a row shares its signals. Rows that are sampled ahead are asked about by another thread.
        self._asked: dict[int, list[_Asked]] = {}
        self._begun: dict[int, list[_Asked]] = {}  # what `arrive` waits for
        self._held: list[_Asked] = []  # not sent yet
        self._holding = threading.Lock()

    @property
    def reads_locally(self) -> bool:
        """Whether signals may come from models in this process."""
        return self._local is not None and bool(self._local.models)

    def teachers(self, labels: Labels) -> set[str]:
        """Every value of `row.teacher` for prompts with these pairs of (teacher, domain)."""
        return self._requests.names(labels)

    def positions(self, rows: Iterable[Row]) -> dict[str, int]:
        """Prompt and response positions in the calls for `rows`, by role, as `Requests.positions` counts them."""
        return self._requests.positions(rows)

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form in which equal answers compare equal; None if there is none."""
        return self._verification.extract(rows)

    def verify(self, row: Row) -> None:
        """Start judging a row; returns at once."""
        if self.needs.reward == "verdict":
            self._verification.submit(row)

    def ask(self, row: Row, *, verify: bool = True) -> None:
        """Start scoring a row and, with `verify`, judging it; returns at once.

        Requests with contexts made from outcomes wait until the row is judged.
        """
        if verify:
            self.verify(row)
        if self._contexts is not None:
            self._contexts.fill(row)
        route = self._requests.route(row.prompt)
        if route.parts:
            row.teacher, row.teachers = route.name, route.summed
        for name, _ in route.parts:
            if name in self._translators:
                prompt = row.prompt if self._contexts is None else self._contexts.read_by(name, row.prompt)
                row.translations[name] = self._translators[name].translate(row, prompt)
        self._ask(row, late=False)

    def _ask_late(self, rows: Sequence[Row], rewards: "StepRewards | None") -> None:
        """Ask the models whose contexts are made from outcomes."""
        if self._contexts is None or rewards is None:
            return
        self._contexts.fill_late(rows, rewards.group)
        for row in rows:
            # A role without a context for this row reads the student's prompt, because every row of a micro-batch needs
            # values of every role; the terms of that role skip the row.
            calls = self._ask(row, late=True)
            row.unread = frozenset(call.need.role for call in calls if call.reads not in row.contexts)

    def _ask(self, row: Row, *, late: bool) -> list[Call]:
        calls = [call for call in self._requests.of(row) if (call.reads in self._late) == late]
        asked = self._asked[id(row.signals)] = [_Asked(row, call) for call in calls]
        # What is read in process gets its answer when the row is waited for, with many others.
        self._hold([one for one in asked if not one.call.target.local])
        return calls

    def _hold(self, asked: Sequence[_Asked]) -> None:
        """Send calls to the fleet together with waiting ones, once there are enough tokens."""
        if not asked:
            return
        if self._fleet is None:
            raise ConfigError(f"model {asked[0].call.target.model!r} is not served; set teachers.endpoints.")
        with self._holding:
            self._held += asked
            if sum(len(one.call.item.token_ids) for one in self._held) >= _SENT_TOKENS:
                self._send()

    def flush(self) -> None:
        """Send all waiting calls, because no further rows are coming soon."""
        with self._holding:
            self._send()

    def _send(self) -> None:
        """Send all waiting calls, one batch per model and payload; the caller holds the lock."""
        held, self._held = self._held, []
        alike: dict[tuple[str, PayloadSpec, float], list[_Asked]] = {}
        for one in held:
            alike.setdefault((one.call.target.model, one.call.spec, one.call.need.level), []).append(one)
        for (model, spec, level), batch in alike.items():
            items, groups = [one.call.item for one in batch], [one.row.key.group for one in batch]
            assert self._fleet is not None
            answers = self._fleet.submit_many(model, items, spec, temperature=level, groups=groups)
            for one, answer in zip(batch, answers, strict=True):
                one.answer = answer

    def judge(
        self, rows: Sequence[Row], rewards: "StepRewards | None" = None, *, poll: Callable[[], None] = _no_poll
    ) -> None:
        """Wait until every row has its verdict, if verdicts are needed; then reward the rows.

        Args:
            rows: rows that were given to `ask` or `verify`.
            rewards: the rewards of the step, if rows come in rounds.
            poll: see `wait`.
        """
        if self.needs.reward == "verdict":
            self._verification.collect(rows, poll=poll)
        if self.needs.reward and (rewards := self._batch(rewards)) is not None:
            rewards(rows)

    def wait(
        self,
        rows: Sequence[Row],
        rewards: "StepRewards | None" = None,
        *,
        judged: bool = False,
        poll: Callable[[], None] = _no_poll,
    ) -> None:
        """Wait until every row has its signals and, unless `judged`, its verdict and reward.

        Args:
            rows: rows that were given to `ask`.
            rewards: the rewards of the step, if rows come in rounds.
            judged: whether the rows already have their verdicts and rewards.
            poll: called about twice a second while waiting, and before each batch that is scored in this process; may
                raise to give up, which cancels all calls about the rows.

        Raises:
            OpdError: if a call failed.
        """
        rewards = self._batch(rewards)
        self.begin(rows, poll=poll)
        self.arrive(rows, poll=poll)
        # Judged after the models have answered, because a reward may read their signals.
        if not judged:
            self.judge(rows, rewards, poll=poll)
        if self._late:
            self._ask_late(rows, rewards)
            self.begin(rows, poll=poll)
            self.arrive(rows, poll=poll)

    def _batch(self, rewards: "StepRewards | None") -> "StepRewards | None":
        return self._rewards() if rewards is None and self._rewards is not None else rewards

    def begin(self, rows: Sequence[Row], *, poll: Callable[[], None] = _no_poll) -> None:
        """Begin to wait for rows that `arrive` will name, all or some at a time.

        Args:
            rows: rows that were given to `ask`.
            poll: see `wait`. All batches of models in this process are scored within this call.
        """
        begun = [one for row in rows for one in self._asked.pop(id(row.signals), [])]
        for one in begun:
            self._begun.setdefault(id(one.row.signals), []).append(one)
        try:
            self.flush()
            # First score in this process, while the fleet works on what it was sent during the rollout.
            self._read(begun, poll)
        except BaseException:
            self.give_up(rows)
            raise

    def late(self, rows: Iterable[Row]) -> int:
        """How many of `rows` still lack an answer."""
        return sum(
            any(one.answer is None or not one.answer.done() for one in self._begun.get(id(row.signals), ()))
            for row in rows
        )

    @property
    def begun(self) -> bool:
        """Whether rows have begun to be waited for that have not arrived."""
        return bool(self._begun)

    def arrive(self, rows: Sequence[Row], *, poll: Callable[[], None] = _no_poll) -> None:
        """Wait for all answers about `rows`, and put them into `row.signals`; rows that have arrived keep theirs.

        Args:
            rows: rows that `begin` was given, or copies that share their signals.
            poll: see `wait`.

        Raises:
            OpdError: if a call failed; the other calls about `rows` are cancelled.
        """
        begun = {key: self._begun[key] for key in (id(row.signals) for row in rows) if key in self._begun}
        answers = {one.answer for asked in begun.values() for one in asked if one.answer is not None}
        try:
            while answers:
                done, answers = wait(answers, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for answer in done:
                    answer.result()  # raises the error of a failed call at once, without waiting for the rest
                if answers:
                    poll()
                    if self._watch is not None and self._fleet is not None:
                        self._watch.see(self._fleet.outages())
        except BaseException:
            self.give_up(rows)
            raise
        for key in begun:
            self._keep(self._begun.pop(key))
        if self._watch is not None and not self._begun:  # until then, other rows may still wait for a lost teacher
            self._watch.see([])

    def give_up(self, rows: Sequence[Row] | None = None) -> None:
        """Cancel all calls about `rows` that have begun and not arrived, so that they load no server; None for all."""
        for key in [*self._begun] if rows is None else [id(row.signals) for row in rows]:
            for one in self._begun.pop(key, ()):
                if one.answer is not None:
                    one.answer.cancel()

    def reread(self, rows: Sequence[Row]) -> dict[str, int]:
        """Read what the terms want of role "student" again, with the present weights; returns positions read."""
        asked = [[_Asked(row, c) for c in self._requests.of(row) if c.need.role == STUDENT] for row in rows]
        everything = [one for mine in asked for one in mine]
        self._read(everything, _no_poll)
        for mine in asked:
            self._keep(mine)
        return {"local": sum(len(one.call.item.token_ids) for one in everything)}

    def _read(self, asked: Sequence[_Asked], poll: Callable[[], None]) -> None:
        """Answer the calls to models in process."""
        if self._local is None:
            return
        # Iterate over needs and not over calls, because ranks of a sharded student must read equally often.
        for need in self.needs.signals:
            for model in self._local.models:
                mine = [one for one in asked if one.call.need == need and one.call.target.is_here(model)]
                scores = self._local.score(
                    model,
                    [one.call.item for one in mine],
                    need.spec,
                    rows=[one.row for one in mine],
                    temperature=self._local.temperature if need.temperature is None else need.temperature,
                    poll=poll,
                )
                for one, answer in zip(mine, scores, strict=True):
                    one.answer = Future()
                    one.answer.set_result(answer)

    def _keep(self, asked: Sequence[_Asked]) -> None:
        """Put the answers to all calls about a row into `row.signals`."""
        for row in {id(one.row): one.row for one in asked}.values():
            answers = [(one.call, one.answer.result()) for one in asked if one.answer is not None]
            row.signals |= self._requests.signals(row, answers)

    def fetch_heads(self, rows: Iterable[Row]) -> None:
        """Fetch the output heads for the hidden states of scored rows."""
        hidden = {(role, row.teacher): row for row in rows for role, kind in row.signals if kind is PayloadKind.HIDDEN}
        for (role, _), row in hidden.items():  # once each: the fleet is asked, though it fetches no head twice
            self.head_of(role, row)

    def head_of(self, role: str, row: Row) -> OutputHead:
        """The head of the model that `role` means for `row`, float32 on the device, fetched once."""
        target = self._requests.model_of(role, row)
        name = target.model
        if target.local and self._local is not None:
            return self._local.head(name)
        if self._fleet is None:
            raise ConfigError("hidden payloads need served models; set teachers.endpoints.")
        served = self._fleet.head(name)
        key = f"{name}/{served.hash}"
        head = self._heads.get(key)
        if head is None:
            head = OutputHead.received(served, self._device)
            # The dict is replaced rather than changed, because a probe reads it in its own thread. Older heads of the
            # same model are dropped, because its weights were updated.
            others = {k: v for k, v in self._heads.items() if not k.startswith(f"{name}/")}
            self._heads = {**others, key: head}
        return head
