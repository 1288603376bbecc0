"""Summaries that the student writes of its own episode, so that it may outgrow its context (SUPO).

    prompt  ...  a_t  instruction  |summary|                    a window; bars: what the student writes here
    prompt  summary  o_t  |a_t+1|  ...  instruction  |summary|  the next one begins with the summary

Where the next observation o_t would leave no room in `context_tokens`, the instruction stands in its place, and o_t
follows the summary: it is read as it was, and the summary holds what came before. No sequence has more than
`context_tokens`. The environment sees nothing of it. A summary is a turn of the row like any other: sampled, scored and
trained in the window that it was written in, with the episode's one advantage, whatever the number of windows.

An empty summary, or one cut at its limit, stands as it is, and what comes of it is the student's to learn; both are
counted. An episode that needs more than `most` summaries, or has no room after one, ends by `context`, and has failed.

Source: arXiv 2510.06727, by notes on it. There rollouts that hit a limit are left out of the loss, but not out of the
statistics of their group: method episode_filter, ended [turns, tokens, context].
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.config import Settings
from opd.tasks.turns import Answered, encode_turns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.rollout.episode import Episode

CONTEXT = "context"
"""How an episode has ended that found no room."""
_INSTRUCTION = (
    "Your context is nearly full. Summarise the episode so far: what is to be done, what was found out, and what comes "
    "next. You will go on from the first message and your summary alone."
)


class SummarySettings(Settings):
    """Summaries of an episode by the student, with `history: summary`."""

    context_tokens: int = Field(
        8192, ge=1, description="Longest sequence: prompt, what is seen of the episode, and the turn that is written."
    )
    tokens: int = Field(512, ge=1, description="Longest summary in tokens. A longer one is truncated and counted.")
    most: int = Field(
        8, ge=1, description="Maximum number of summaries in an episode. If it needs more, it ends by context."
    )
    instruction: str = Field(
        _INSTRUCTION, min_length=1, description="Text that asks for a summary, in place of the next observation."
    )


class Summaries:
    """When an episode is summarised, and what is written around a summary.

    Args:
        settings: the limits.
        turn_tokens: longest turn of the student.
        tokenizer: the student's.
        stops: ids that end a turn.
    """

    def __init__(self, settings: SummarySettings, turn_tokens: int, tokenizer: Any, stops: frozenset[int]) -> None:
        self.settings, self._turn_tokens = settings, turn_tokens
        self._tokenizer, self._stops = tokenizer, stops
        self._lengths: dict[str, int] = {}  # of the instruction, by the framing that the prompt asks for

    def due(self, episode: Episode, coming: int) -> bool:
        """Whether no turn can be written after `coming` further ids that leaves room for a summary, where one may be.

        Always before there would be no room for the summary itself, so that no window outgrows its limit.
        """
        room = self.settings.context_tokens - episode.read - coming - self._turn_tokens
        more = len(episode.summaries) < self.settings.most
        return room < (self._instruction(episode.prompt) + self.settings.tokens if more else 0)

    def ask(self, episodes: Sequence[Episode], candidates: int) -> None:
        """Put the instruction where the observation would stand; those that may not be summarised end by context."""
        able = [episode for episode in episodes if len(episode.summaries) < self.settings.most]
        for episode in episodes:
            if episode not in able:
                episode.ended = CONTEXT
        asked = [Answered(self.settings.instruction, episode.prompt, episode.ids) for episode in able]
        for episode, ids in zip(able, encode_turns(asked, self._tokenizer, self._stops), strict=True):
            if len(episode.ids) + len(ids) >= episode.planned.max_new_tokens:
                episode.ended = "tokens"
            else:
                episode.hear(ids, candidates)
                episode.beside += len(ids)

    def take(self, episode: Episode, row: Row) -> None:
        """Add a summary: what `row` holds after the instruction."""
        first = len(episode.ids) - episode.seen_from
        episode.summarise(row, first)
        episode.empty += not row.text.strip()
        episode.cut += int(row.response_ids[-1]) not in self._stops

    def go_on(self, episodes: Sequence[Episode], candidates: int) -> None:
        """Have the observations that summaries stand before follow them."""
        waiting = [episode.waiting for episode in episodes if episode.waiting is not None]
        for episode, ids in zip(episodes, encode_turns(waiting, self._tokenizer, self._stops), strict=True):
            episode.waiting = None
            if self.due(episode, len(ids)):
                episode.ended = CONTEXT
            elif len(episode.ids) + len(ids) >= episode.planned.max_new_tokens:
                episode.ended = "tokens"
            else:
                episode.hear(ids, candidates)

    def _instruction(self, prompt: Prompt) -> int:
        """Ids of the instruction with its framing, and at most one fewer where the turn before has its end."""
        framing = json.dumps([prompt.messages is None, prompt.template_options], sort_keys=True, default=str)
        if framing not in self._lengths:
            asked = Answered(self.settings.instruction, prompt, ())
            self._lengths[framing] = len(encode_turns([asked], self._tokenizer, self._stops)[0])
        return self._lengths[framing]


def notes_of(episode: Episode) -> Mapping[str, float]:
    """What a row notes: summaries, those that are empty or cut, and the tokens of context that its turns were spared.

    A turn is spared what it would have read before it with the whole history, less what it read: instructions and
    summaries are not part of the whole history, and the summary that it read counts against it.
    """
    return {
        "summaries": float(len(episode.summaries)),
        "summaries_empty": float(episode.empty),
        "summaries_cut": float(episode.cut),
        "context_saved": float(episode.saved),
    }
