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
    from student.data.plan import EpisodePlan, PlannedRow
    from student.data.row import Row


@dataclass(slots=True, eq=False)
class Episode:
    """An episode under way."""

    planned: PlannedRow
    plan: EpisodePlan
    prompt: Prompt  # with the first observation
    ids: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)  # True where the student sampled the id
    logp: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    prompt_ids: np.ndarray | None = None
    version: int = 0
    turns: list[tuple[int, int]] = field(default_factory=list)
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

    def take(self, row: Row, end: int, text: str) -> None:
        """Add the student's turn: what `row` holds up to `end`, as the continuation of everything before."""
        start = len(self.ids)
        self.prompt_ids = row.prompt_ids
        self.version = int(row.policy_version[-1])
        self.ids += row.response_ids[start:end].tolist()
        self.own += [True] * (end - start)
        self.logp += row.behaviour_logp[start:end].tolist()
        if row.candidates is not None:
            self.candidates += list(row.candidates[start:end])
        self.turns.append((start, end))
        self.texts.append(text)
        self.states.append(self.shown[0])
        self.agents.append(self.shown[1])

    def give(self, text: str, ids: Sequence[int], k: int, turn: int) -> None:
        """Add an action that is learnt from as it was given, unless the plan passes it over."""
        learnt = turn not in self.plan.passed_over
        if learnt:
            self.turns.append((len(self.ids), len(self.ids) + len(ids)))
            self.texts.append(text)
            self.states.append(self.shown[0])
            self.agents.append(self.shown[1])
        self.hear(ids, k, learnt=learnt)

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
