"""The plan of a step: which prompts, how many samples and how long; methods rewrite it before the rollout.

The prompts come from the run's cursor, its position in the stream of training prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from student.data.row import Row, RowKey


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """The beginning of another episode of the step, with which an episode starts; never part of a saved plan.

    Attributes:
        row: the other episode.
        turns: number of its turns to take over, with ids and log-probs; they are learnt from like the rest.
    """

    row: Row
    turns: int


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """How an episode is played.

    Attributes:
        turns: maximum number of turns of the student; 0 for the run's limit.
        replay: given actions that are played first; they are part of the history but not learnt from.
        given: whether `replay` is the whole episode and is learnt from: a row of origin expert.
        passed_over: with `given`, indices in `replay` of actions that are not learnt from, such as mistakes.
        branch: the beginning of another episode to start with; None to start at the beginning.
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
        key: key of the resulting row.
        prompt: the prompt.
        max_new_tokens: maximum length of the response, tokens.
        temperature: sampling temperature.
        answer: the response as text when it is given instead of sampled; such rows have origin expert.
        prefix_ids: ids with which the response begins and which the student continues. They are not trained on, and
            count neither as sampled nor in `max_new_tokens`. They are ids because re-encoding text may change them.
        behaviour_prompt: the prompt to sample under if it differs from `prompt` (a hint); the row is trained under
            `prompt` and has origin hinted.
        stop_ids: ids that end this response, besides those of the run.
        tags: labels that the row carries, for groups, metrics and verifiers.
        episode: how to play it if the prompt names an environment; None for the run's settings.
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
    """Plan `samples` responses for each of `prompts`, group after group.

    If a prompt occurs twice in a step, its rows get distinct sample indices, so that no two rows share a random stream.
    A prompt's own length limit applies if it is shorter.
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


class PromptCursor:
    """Gives out the training prompts in order, each once.

    Prompts that were taken count only after `commit`, so interrupted work starts again with the same prompts. Every
    rank takes the same number, so all ranks have the same position.

    Args:
        source: the stream of prompts.

    Attributes:
        source: the stream of prompts.
        position: number of prompts taken and committed; saved with the run.
        taken: number of prompts taken since the last `commit`.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.position = 0
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        prompts = self.source.prompts("train", count, self.position + self.taken)
        self.taken += count
        return prompts

    def begin(self) -> None:
        """Return to the last `commit`, so that prompts taken since then are given out again."""
        self.taken = 0

    def commit(self) -> None:
        """Count the prompts that were taken as used."""
        self.position, self.taken = self.position + self.taken, 0
