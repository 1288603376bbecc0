"""The outcome of a row in a few numbers, small enough to send to every rank and to keep in checkpoints.

Everything that chooses between rows or averages over them (advantages, samplers, windows, curricula) reads outcomes of
all ranks, so that its result is the same on every rank and independent of how rows are spread over ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.row import Origin, Row
    from student.model.ranks import Ranks

KEYS = ("step", "uid", "sample", "turn", "agent", "rollout")
"""Parts of a group key that every outcome has; any other part is the name of a tag."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a row, with one entry for each in every field that is not empty.

    Attributes:
        spans: (start, end) in the response, tokens; empty for single turns.
        rewards: rewards by turn, of which the last includes the named parts of the row's, such as a penalty for length.
        states, agents: see `student.data.row.EpisodeTrace`.
    """

    spans: tuple[tuple[int, int], ...] = ()
    rewards: tuple[float, ...] = ()
    states: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a row.

    Attributes:
        step, uid, sample, turn, agent: the row's key.
        tags: the row's labels.
        domain: domain of its prompt, "" for none.
        teacher: the teacher that the route gave it, "" for none.
        origin: who wrote the response.
        on_policy: whether the student sampled it in this step, under the prompt that it is trained under.
        trained: whether it is trained on; other rows only count in statistics.
        reward: the reward; None if it is unknown, which is never treated as 0.
        turns: its turns.
        prompt_length: prompt tokens.
        length: response tokens.
        tokens: response tokens that are trained on.
        truncated: whether the length limit ended the response.
        sums: sums over the trained tokens, nats: "behaviour" is the log-prob under the sampler, and each role whose
            sampled log-probs the row carries has its own.
        notes: numbers of this step that a method attached to the row.
    """

    step: int
    uid: str
    sample: int
    turn: int = 0
    agent: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    domain: str = ""
    teacher: str = ""
    origin: Origin = "policy"
    on_policy: bool = True
    trained: bool = True
    reward: float | None = None
    turns: Turns = Turns()
    prompt_length: int = 0
    length: int = 0
    tokens: int = 0
    truncated: bool = False
    sums: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def sort_key(self) -> tuple[int, str, int, int, str]:
        """The key by which outcomes are sorted: that of the row."""
        return self.step, self.uid, self.sample, self.turn, self.agent

    @property
    def rollout(self) -> str:
        """Key of the episode, shared by its rows."""
        return f"{self.step}/{self.uid}/{self.sample}"

    def key(self, parts: Sequence[str]) -> tuple[Any, ...]:
        """The values of `parts`, each one of `KEYS` or the name of a tag; () for no parts: one group for all.

        Raises:
            ConfigError: when the row has no tag of that name.
        """
        return tuple(self._part(part) for part in parts)

    def _part(self, part: str) -> Any:
        if part in KEYS:
            return getattr(self, part)
        if part not in self.tags:
            names = ", ".join((*KEYS, *self.tags))
            raise ConfigError(
                f"rows have no tag {part!r}, by which an advantage forms groups (its setting group); use one of "
                f"{names}."
            )
        return self.tags[part]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for checkpoints."""
        return asdict(self) | {"tags": dict(self.tags), "sums": dict(self.sums), "notes": dict(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """What `to_dict` gave."""
        spans = tuple((int(start), int(end)) for start, end in data["turns"]["spans"])
        by_turn = (tuple(data["turns"][name]) for name in ("rewards", "states", "agents"))
        return cls(**{**data, "turns": Turns(spans, *by_turn)})


def reward_of(row: Row) -> float | None:
    """The reward of a plug-in, else the verdict's value, plus all named parts; None if it is unknown.

    Raises:
        DataError: if it is not finite.
    """
    reward = row.reward
    if reward is None:
        if row.rewarded or row.verdict is None or not row.verdict.known:
            return None
        reward = row.verdict.value
    reward += sum(row.reward_parts.values())
    if not math.isfinite(reward):
        raise DataError(
            f"the reward of sample {row.key.sample} of prompt {row.key.uid} is {reward}; a reward must be finite, and "
            "None where it is unknown."
        )
    return reward


def outcome_of(row: Row) -> Outcome:
    """The outcome of one row.

    Raises:
        DataError: when its reward is not finite.
    """
    mask = row.loss_mask
    # Only if every trained token has a log-prob, because a sum over some of them would be taken for the response's.
    behaviour = _sum(row.behaviour_logp, mask)
    sums = {"behaviour": behaviour} if math.isfinite(behaviour) else {}
    for (role, _), scores in row.signals.items():
        if scores.sampled is not None:
            sums[role] = _sum(scores.sampled, mask)
    return Outcome(
        step=row.key.step,
        uid=row.key.uid,
        sample=row.key.sample,
        turn=row.key.turn,
        agent=row.key.agent,
        tags=dict(row.tags),
        domain=row.prompt.domain or "",
        teacher=row.teacher,
        origin=row.origin,
        on_policy=row.on_policy,
        trained=row.trained,
        reward=reward_of(row),
        turns=_turns(row),
        prompt_length=len(row.prompt_ids),
        length=row.length,
        tokens=int(np.count_nonzero(mask)),
        truncated=row.truncated,
        sums=sums,
        notes=dict(row.notes),
    )


def _turns(row: Row) -> Turns:
    """The turns; named parts of the reward, which judge the whole episode, are added to the last turn's."""
    rewards = [float(value) for value in row.turn_rewards]
    if rewards:
        rewards[-1] += sum(row.reward_parts.values())
    episode = row.episode
    states, agents = ((), ()) if episode is None else (episode.states, episode.agents)
    return Turns(tuple(row.turns), tuple(rewards), states, agents)


def gather_outcomes(rows: Sequence[Row], ranks: Ranks | None = None) -> tuple[list[Outcome], list[int]]:
    """The outcomes of all rows of the step on all ranks, sorted by key, and the index of each of `rows` among them.

    The order does not depend on how the rows are spread over ranks, and so neither does anything computed from it.

    Args:
        rows: this rank's rows.
        ranks: all ranks, each of which must call this; None for the rows of this rank alone.

    Raises:
        DataError: if a reward is not finite; the other ranks are cancelled.
    """
    # A reward that is not finite must fail on all ranks, because the others would wait in the exchange.
    parts = [[outcome_of(row) for row in rows]] if ranks is None else _of_all_ranks(rows, ranks)
    mine = 0 if ranks is None else ranks.index
    labelled = [(rank, place, outcome) for rank, part in enumerate(parts) for place, outcome in enumerate(part)]
    labelled.sort(key=lambda entry: entry[2].sort_key)
    places = {place: index for index, (rank, place, _) in enumerate(labelled) if rank == mine}
    return [outcome for _, _, outcome in labelled], [places[place] for place in range(len(rows))]


def _of_all_ranks(rows: Sequence[Row], ranks: Ranks) -> list[list[Outcome]]:
    return ranks.gather(ranks.agree(lambda: [outcome_of(row) for row in rows]))


def _sum(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> float:
    """The sum over trained tokens, in float64; other tokens may hold NaN."""
    return float(np.where(mask, values, 0.0).sum(dtype=np.float64))
