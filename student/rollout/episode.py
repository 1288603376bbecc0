"""An episode under way: what the student and its environment have said so far, and whose each token is."""

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
    """An episode under way."""

    planned: PlannedRow
    plan: EpisodePlan
    prompt: Prompt  # with the first observation
    history: int | None = None  # turns that are seen with what followed them; None: all
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # True where the student sampled the id
    logp: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    prompt_ids: np.ndarray | None = None
    version: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)  # where each turn's history begins
    actions: list[int] = field(default_factory=list)  # where each action begins, replayed ones too
    rewards: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    shown: tuple[str, str] = ("", "")  # where the environment stands, and who acts next
    tools: bool = False
    bad_calls: float = 0.0
    measures: dict[str, float] = field(default_factory=dict)  # what the environment measured, as NAME/TURN
    ended: str = ""
    why: str = ""  # it broke: one clause for people
    success: bool | None = None
    # Where the student summarises, see `student.rollout.summaries`:
    waiting: Answered | None = None  # an observation that the next summary stands before
    summaries: list[int] = field(default_factory=list)  # places in `turns`
    beside: int = 0  # ids that no whole history would hold: instructions and summaries
    saved: int = 0  # ids that turns were spared, summed over turns
    empty: int = 0
    cut: int = 0

    @property
    def acted(self) -> int:
        """Turns of the student that the environment has seen, replayed ones left out."""
        return len(self.turns) - len(self.summaries)

    @property
    def read(self) -> int:
        """Ids that the next turn is written after, of prompt and episode."""
        return (0 if self.prompt_ids is None else len(self.prompt_ids)) + len(self.ids) - self.seen_from

    @property
    def seen_from(self) -> int:
        """Where the history begins that the next turn is written after."""
        if self.summaries:
            return self.turns[self.summaries[-1]][0]
        if self.history is None or len(self.actions) <= self.history:
            return 0
        return self.actions[-self.history]

    @property
    def windows(self) -> tuple[Window, ...]:
        """`Row.windows`: turns after histories that begin at one place share a window."""
        if not any(self.since):
            return ()
        found: list[Window] = []
        for since, (start, end) in zip(self.since, self.turns, strict=True):
            shared = found.pop()[1] if found and found[-1][0] == since else start
            found.append((since, shared, end))
        return tuple(found)

    def take(self, row: Row, first: int, end: int, text: str) -> None:
        """Add the student's turn: what `row` holds from `first` to `end`, as the continuation of everything before."""
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
        """Add the student's summary, a turn that the environment does not see and gives no reward: as `take` does."""
        saved = self.saved
        self.take(row, first, row.length, row.text)
        start, end = self.turns[-1]
        self.saved, self.beside = saved, self.beside + end - start
        self.summaries.append(len(self.turns) - 1)
        self.rewards.append(0.0)
        self.states[-1] = f"summary of {self.shown[0]}"  # comparable with other summaries there, and with no action

    def _begin_turn(self, length: int, text: str) -> None:
        start = len(self.ids)
        self.since.append(self.seen_from)
        self.actions.append(start)
        self.turns.append((start, start + length))
        self.texts.append(text)
        self.states.append(self.shown[0])
        self.agents.append(self.shown[1])

    def give(self, text: str, ids: Sequence[int], k: int, turn: int) -> None:
        """Add an action that is learnt from as it was given, unless the plan passes it over."""
        learnt = turn not in self.plan.passed_over
        if learnt:
            self._begin_turn(len(ids), text)
            self.hear(ids, k, learnt=True)
        else:
            self.replay(ids, k)

    def replay(self, ids: Sequence[int], k: int) -> None:
        """Add an action that is not learnt from."""
        self.actions.append(len(self.ids))
        self.hear(ids, k)

    def stop(self, error: EpisodeError) -> None:
        """End it as broken."""
        self.ended, self.why = f"broken: {error.kind}", error.reason

    def see(self, seen: Observation) -> None:
        """Keep where the environment stands: what it says of itself in info, or else what it shows."""
        said = json.dumps([seen.info.get("state", seen.text), *seen.results])
        self.shown = (blake2b(said.encode(), digest_size=8).hexdigest(), str(seen.info.get("agent", "")))

    def hear(self, ids: Sequence[int], k: int, *, learnt: bool = False) -> None:
        """Add ids of the environment, or of actions that were replayed; `learnt` ones are trained on."""
        self.ids += ids
        self.own += [learnt] * len(ids)
        self.logp += [float("nan")] * len(ids)
        if k:
            self.candidates += [np.arange(k, dtype=np.uint32)] * len(ids)
