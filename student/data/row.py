"""The record that flows through the loop: one sampled response with everything known about it.

Shapes: P prompt tokens, T response tokens, K candidate ids per position. Arrays live on the host in numpy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from opd.wire.spans import spans_of
from opd.wire.types import PayloadKind, ScoreItem, Scores
from student.data.translation import Translation

Origin = Literal["policy", "hinted", "expert", "branch", "replay"]
SignalKey = tuple[str, PayloadKind]
Window = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RowKey:
    """Identity of a row within a run, and the parts of its group key.

    Attributes:
        step: the step that planned the row.
        uid: the prompt's uid; rows of one prompt and step form a group.
        sample: index within the group.
        turn, agent: position in a multi-turn or multi-agent episode; 0 and "" for single turns.
        parent: sample index of the row that this one branched from, its own if a guide began it, or -1.
    """

    step: int
    uid: str
    sample: int
    turn: int = 0
    agent: str = ""
    parent: int = -1

    @property
    def group(self) -> str:
        """Key of the group, shared by the samples of one prompt; also the prefix-affinity key of the fleet."""
        return f"{self.step}/{self.uid}/{self.turn}/{self.agent}"

    @property
    def rollout(self) -> str:
        """Key of the episode, shared by its rows if an episode has several."""
        return f"{self.step}/{self.uid}/{self.sample}"


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeTrace:
    """How an environment played a row.

    Attributes:
        tool_mask: [T] bool, True where the environment wrote the token.
        windows: (since, start, end) if the student did not read the whole history: it wrote positions start to end
            after the prompt and the response from `since` on. Windows cover every trained position; empty if it read
            everything.
        summaries: indices in `Row.turns` of the student's summaries, which the environment did not see.
        states: for each turn, a hash of the environment's state; equal states of one prompt are comparable.
        agents: for each turn, the agent that acted; empty if agents are not told apart.
    """

    tool_mask: NDArray[np.bool_]
    windows: tuple[Window, ...] = ()
    summaries: tuple[int, ...] = ()
    states: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CriticValues:
    """What critics wrote about a row.

    Attributes:
        values: [T] float32, the value of the state before each token; None without a critic of tokens.
        credit: [T] float32, the advantage of each token by a critic of turns, by the critic's class.
    """

    values: NDArray[np.float32] | None = None
    credit: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Row:
    """One response.

    Attributes:
        key: identity.
        prompt: the prompt it answers.
        prompt_ids: [P] uint32, the prompt the student is trained under.
        response_ids: [T] uint32, sampled ids, including the end-of-sequence id if it was sampled.
        behaviour_logp: [T] float32, log-probs under the sampler at the rollout temperature, nats; NaN for tokens that
            the student did not sample.
        policy_version: [T] int32, number of steps that the sampling weights had been trained for.
        loss_mask: [T] bool, True where the token is trained on.
        truncated: True when the length limit, not the end-of-sequence id, ended the response.
        text: what the student sampled, with what a branch took over, decoded without special tokens and given prefix.
        candidates: [T, K] uint32, the student's K most likely ids in descending order; None unless needed.
        origin: who wrote the response.
        behaviour_prompt_ids: [P'] uint32, the prompt it was sampled under if that is another (a hint), else None.
        turns: (start, end) of each turn in the response, in tokens; one turn for single-turn rows.
        episode: how an environment played it; None for a single answer.
        teacher: name of the teacher that the route gave, or the weighted names of several.
        teachers: (teacher, weight) if divergences to several teachers are summed; weights sum to 1. Otherwise empty.
        contexts: [P'] uint32 by role, the prompt that the role's model reads in place of the student's (a hint, a
            system prompt); never part of the student's input.
        translations: the row in the tokens of teachers that have another tokenizer, by teacher.
        unread: roles whose context for this row is missing or too long; terms that learn from them skip the row.
        signals: scores by (role, payload kind); with `teachers`, each has a role of its own, `teacher_role(name)`.
        verdict: the verifier's verdict; None if it was not asked.
        reward_parts: named parts of the reward; an unknown part is absent, never 0.
        reward: a plug-in's reward in place of the verdict, in any range; None if unknown.
        rewarded: whether a plug-in's reward replaces the verdict, so that None in `reward` means unknown.
        token_rewards: [T] float32, rewards by token; None if only the whole is rewarded.
        turn_rewards: the reward of each turn; empty if only the whole is rewarded.
        critic: what critics wrote about it.
        weight: multiplies the row's loss.
        trained: False for rows that count in the statistics of their group but are not learnt from.
        tags: labels such as mode, template or role, for groups, metrics and verifiers.
        moe_routes: [P + T or one less, layers, k] int16, the experts of a mixture that each token of prompt and
            response was routed to, in the rollout or in the old policy's pass; None unless needed.
        notes: numbers by name that a method shares with all ranks about the row; the step's report contains them.
    """

    key: RowKey
    prompt: Prompt
    prompt_ids: NDArray[np.uint32]
    response_ids: NDArray[np.uint32]
    behaviour_logp: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    truncated: bool
    text: str
    candidates: NDArray[np.uint32] | None = None
    origin: Origin = "policy"
    behaviour_prompt_ids: NDArray[np.uint32] | None = None
    turns: tuple[tuple[int, int], ...] = ()
    episode: EpisodeTrace | None = None
    teacher: str = ""
    teachers: tuple[tuple[str, float], ...] = ()
    contexts: dict[str, NDArray[np.uint32]] = field(default_factory=dict)
    translations: dict[str, Translation] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    signals: dict[SignalKey, Scores] = field(default_factory=dict)
    verdict: Verdict | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    rewarded: bool = False
    token_rewards: NDArray[np.float32] | None = None
    turn_rewards: tuple[float, ...] = ()
    critic: CriticValues = CriticValues()
    weight: float = 1.0
    trained: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    moe_routes: NDArray[np.int16] | None = None
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """T, tokens of the response."""
        return len(self.response_ids)

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows of an episode whose history was cut; empty for every other row."""
        return () if self.episode is None else self.episode.windows

    @property
    def summaries(self) -> tuple[int, ...]:
        """Indices in `turns` of the summaries of an episode."""
        return () if self.episode is None else self.episode.summaries

    @property
    def written(self) -> NDArray[np.bool_]:
        """[T] bool, True where a policy or an expert wrote the token, and not the environment."""
        return np.ones(self.length, np.bool_) if self.episode is None else ~self.episode.tool_mask

    @property
    def actions(self) -> list[tuple[int, int]]:
        """(start, end) of each turn that the environment saw: all of `turns` except summaries."""
        return [span for turn, span in enumerate(self.turns) if turn not in self.summaries]

    @property
    def verdict_value(self) -> float | None:
        """The verdict's value; None without a verdict, or where the verifier could not tell."""
        return self.verdict.value if self.verdict is not None and self.verdict.known else None

    @property
    def on_policy(self) -> bool:
        """Whether a policy of this run sampled the row in this step, under the prompt that it is trained under."""
        return self.origin in ("policy", "branch") and self.behaviour_prompt_ids is None

    @property
    def sequences(self) -> tuple[Window, ...]:
        """The sequences that a model reads for the row, as windows (since, start, end)."""
        return self.windows or ((0, 0, len(self.response_ids)),)

    @property
    def longest(self) -> int:
        """Tokens of the longest of its sequences."""
        if not self.windows:  # a fast path, because this is nearly every row and is read several times a step
            return len(self.prompt_ids) + len(self.response_ids)
        return len(self.prompt_ids) + max(end - since for since, _, end in self.windows)

    @property
    def positions(self) -> int:
        """Number of tokens that a model reads for the row, over all its sequences."""
        if not self.windows:
            return len(self.prompt_ids) + len(self.response_ids)
        return sum(len(self.prompt_ids) + end - since for since, _, end in self.windows)

    def read_before(self, position: int) -> NDArray[np.uint32]:
        """The ids that the student had read when it wrote the token at `position`."""
        since = next((since for since, _, end in self.sequences if position < end), self.sequences[-1][0])
        return np.concatenate([self.prompt_ids, self.response_ids[since:position]])

    def log_probs(self, role: str) -> NDArray[np.float32] | None:
        """[T] log-probs of the response tokens under a role, from any payload that has them; None if none does."""
        sampled = (scores.sampled for (owner, _), scores in self.signals.items() if owner == role)
        return next((values for values in sampled if values is not None), None)

    def asked_positions(self, *, role: str = "", own: bool = False) -> int:
        """Number of tokens of all requests that `asked` returns."""
        if not self.windows:  # one request, of everything
            return len(self.contexts.get(role, self.prompt_ids)) + len(self.response_ids)
        return sum(len(item.token_ids) for item, _ in self.asked(gather=False, role=role, own=own))

    def asked(self, *, gather: bool, role: str = "", own: bool = False) -> list[tuple[ScoreItem, int]]:
        """The row as requests to a model, one per window: (request, position at which its response begins).

        Args:
            gather: whether to ask at the row's candidates.
            role: use the prompt that this role reads; "" for the student's prompt.
            own: ask only at positions that are trained on or were sampled in a turn, not at what an environment wrote
                or what was given.
        """
        prompt = self.contexts.get(role, self.prompt_ids)
        scored = np.ones(self.length, np.bool_)
        if own:
            scored = self.loss_mask if self.episode is None else self.written
        requests: list[tuple[ScoreItem, int]] = []
        for since, start, end in self.sequences:
            mask = scored[since:end]
            if start > since:
                mask = mask & (np.arange(since, end) >= start)
            if not mask.any() and (requests or end < self.sequences[-1][2]):
                continue  # nothing to ask in this window; a row asks for at least one position
            ids = np.concatenate([prompt, self.response_ids[since:end]])
            item = ScoreItem(ids, len(prompt), spans=spans_of(mask))
            if gather and self.candidates is not None:
                item = replace(item, gather_ids=item.pick(self.candidates[since:end]))
            requests.append((item, since))
        return requests


def are_rows(result: Any) -> bool:
    """Whether the result of a plug-in is a list of rows."""
    return isinstance(result, list | tuple) and all(isinstance(row, Row) for row in result)
