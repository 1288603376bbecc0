"""The plan of a step: which prompts, how many samples, how long; methods rewrite it before the rollout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opd.tasks.prompt import Prompt
from student.data.row import Row, RowKey


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The beginning of another episode of the step, which an episode begins with; never part of a saved plan.

    Attributes:
        row: the other episode.
        turns: how many of its turns; ids and log-probs are taken as they are, and learnt from like the rest.
    """

    row: Row
    turns: int


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """How an episode is played.

    Attributes:
        turns: most turns of the student; 0 for the run's limit.
        replay: actions that are played first, as given: they are in the history, and nothing is learnt from them.
        given: whether `replay` is the whole episode and is learnt from instead: a row of origin expert.
        passed_over: places in `replay` of actions that are not learnt from all the same, mistakes for example.
        branch: the episode that it begins with; None to begin at the start.
    """

    turns: int = 0
    replay: tuple[str, ...] = ()
    given: bool = False
    passed_over: tuple[int, ...] = ()
    branch: Branch | None = None


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One response to sample.

    Attributes:
        key: identity of the row to be.
        prompt: the prompt.
        max_new_tokens: longest response, tokens.
        temperature: sampling temperature.
        answer: the response as text when it is given instead of sampled; such rows have origin expert.
        prefix_ids: ids that the response begins with and the student continues; they are not trained on, and count
            neither as sampled nor in `max_new_tokens`. Ids and no text: encoded again, a text may have others.
        behaviour_prompt: the prompt to sample under when that is another than `prompt` (a hint); the row is trained
            under `prompt` and has origin hinted.
        stop_ids: ids that end this response besides those of the run.
        tags: labels that the row carries, for groups, metrics and verifiers.
        episode: how it is played where the prompt names an environment; None for the run's settings.
    """

    key: RowKey
    prompt: Prompt
    max_new_tokens: int
    temperature: float
    answer: str | None = None
    prefix_ids: tuple[int, ...] = ()
    behaviour_prompt: Prompt | None = None
    stop_ids: frozenset[int] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    episode: EpisodePlan | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step in order."""

    step: int
    rows: tuple[PlannedRow, ...]

    def shard(self, rank: int, ranks: int) -> "StepPlan":
        """The share of one rank: whole groups, so that group statistics need no other rank."""
        groups = list(dict.fromkeys(row.key.group for row in self.rows))
        mine = set(groups[rank::ranks])
        return replace(self, rows=tuple(row for row in self.rows if row.key.group in mine))


def plan_step(
    step: int, prompts: Sequence[Prompt], *, samples: int, max_new_tokens: int, temperature: float
) -> StepPlan:
    """`samples` responses for each of `prompts`, group after group.

    A prompt that occurs twice in a step gets distinct sample indices, so that no two rows share a random stream. A
    prompt's own length limit holds where it is shorter.
    """
    seen: dict[str, int] = {}
    rows = []
    for prompt in prompts:
        first = seen.get(prompt.uid, 0)
        seen[prompt.uid] = first + samples
        longest = min(max_new_tokens, prompt.max_new_tokens or max_new_tokens)
        for sample in range(first, first + samples):
            rows.append(PlannedRow(RowKey(step, prompt.uid, sample), prompt, longest, temperature))
    return StepPlan(step, tuple(rows))
