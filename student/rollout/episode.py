"""The state of an episode being played: the tokens so far, which of them the student sampled, turns and rewards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.environments.base import Observation
    from opd.tasks.environments.pool import EpisodeError
    from opd.tasks.prompt import Prompt
    from opd.tasks.turns import Answered
    from student.data.plan import EpisodePlan, PlannedRow
    from student.data.row import Row, Window


@dataclass(slots=True, eq=False)
class Episode:
    """An episode being played. All indices count from the first token after the prompt."""

    planned: PlannedRow
    plan: EpisodePlan
    prompt: Prompt  # includes the first observation
    history: int | None = None  # how many of the last turns the student reads, with what followed them; None: all
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # True where the student sampled the id
    logp: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    prompt_ids: np.ndarray | None = None
    version: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)  # the index where the history of each turn begins
    actions: list[int] = field(default_factory=list)  # the index where each action begins, replayed ones included
    rewards: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    shown: tuple[str, str] = ("", "")  # hash of the environment's state, and the agent that acts next
    tools: bool = False
    bad_calls: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)  # the environment's measurements, as NAME/TURN
    ended: str = ""
    why: str = ""  # why it broke, one clause
    success: bool | None = None
    # For episodes with summaries, see `student.rollout.summaries`:
    waiting: Answered | None = None  # an observation to append after the next summary
    summaries: list[int] = field(default_factory=list)  # indices in `turns`
    beside: int = 0  # number of ids of instructions and summaries, which are not part of the whole history
    saved: int = 0  # context ids saved, summed over turns
    empty: int = 0
    cut: int = 0

    @property
    def acted(self) -> int:
        """Number of the student's turns that the environment has seen, without replayed ones."""
        return len(self.turns) - len(self.summaries)

    @property
    def read(self) -> int:
        """Number of ids that the student reads before its next turn, prompt included."""
        return (0 if self.prompt_ids is None else len(self.prompt_ids)) + len(self.ids) - self.seen_from

    @property
    def seen_from(self) -> int:
        """The index where the history begins that the student reads before its next turn."""
        if self.summaries:
            return self.turns[self.summaries[-1]][0]
        if self.history is None or len(self.actions) <= self.history:
            return 0
        return self.actions[-self.history]

    @property
    def windows(self) -> tuple[Window, ...]:
        """`Row.windows`; consecutive turns whose histories begin at the same index share a window."""
        if not any(self.since):
            return ()
        found: list[Window] = []
        for since, (start, end) in zip(self.since, self.turns, strict=True):
            shared = found.pop()[1] if found and found[-1][0] == since else start
            found.append((since, shared, end))
        return tuple(found)

    def take(self, row: Row, first: int, end: int, text: str) -> None:
        """Append the student's turn, which is the response of `row` from `first` to `end`."""
        self.prompt_ids = row.prompt_ids
        self.version = int(row.policy_version[-1])
        self.saved += self.seen_from - self.beside if self.summaries else 0
        self._begin_turn(end - first, text)
        self.ids += row.response_ids[first:end].tolist()
        self.own += [True] * (end - first)
        self.logp += row.behaviour_logp[first:end].tolist()
        if row.candidates is not None:
            self.candidates += list(row.candidates[first:end])

    def summarise(self, row: Row, first: int) -> None:
        """Append the student's summary: a turn that the environment does not see and that has no reward."""
        saved = self.saved
        self.take(row, first, row.length, row.text)
        start, end = self.turns[-1]
        self.saved, self.beside = saved, self.beside + end - start
        self.summaries.append(len(self.turns) - 1)
        self.rewards.append(0.0)
        self.states[-1] = f"summary of {self.shown[0]}"  # comparable with summaries in this state, not with actions

    def _begin_turn(self, length: int, text: str) -> None:
        start = len(self.ids)
        self.since.append(self.seen_from)
        self.actions.append(start)
        self.turns.append((start, start + length))
        self.texts.append(text)
        self.states.append(self.shown[0])
        self.agents.append(self.shown[1])

    def give(self, text: str, ids: Sequence[int], k: int, turn: int) -> None:
        """Append a given action that is learnt from, unless the plan passes it over."""
        learnt = turn not in self.plan.passed_over
        if learnt:
            self._begin_turn(len(ids), text)
            self.hear(ids, k, learnt=True)
        else:
            self.replay(ids, k)

    def replay(self, ids: Sequence[int], k: int) -> None:
        """Append an action that is not learnt from."""
        self.actions.append(len(self.ids))
        self.hear(ids, k)

    def stop(self, error: EpisodeError) -> None:
        """End the episode as broken."""
        self.ended, self.why = f"broken: {error.kind}", error.reason

    def see(self, seen: Observation) -> None:
        """Record the environment's state: `info["state"]` if it gives one, otherwise the text of the observation."""
        said = json.dumps([seen.info.get("state", seen.text), *seen.results])
        self.shown = (blake2b(said.encode(), digest_size=8).hexdigest(), str(seen.info.get("agent", "")))

    def hear(self, ids: Sequence[int], k: int, *, learnt: bool = False) -> None:
        """Append ids that the student did not sample, of the environment or a given action; trained on if `learnt`."""
        self.ids += ids
        self.own += [learnt] * len(ids)
        self.logp += [float("nan")] * len(ids)
        if k:
            self.candidates += [np.arange(k, dtype=np.uint32)] * len(ids)
