"""Summaries that the student writes of its own episode, so that an episode may be longer than the context (SUPO).

    prompt  ...  a_t  instruction  |summary|                    a window; bars: what the student writes in it
    prompt  summary  o_t  |a_t+1|  ...  instruction  |summary|  the next window begins with the summary

If the next observation o_t would leave no room in `context_tokens`, the instruction to summarise takes its place, and
o_t follows after the summary, which stands for everything before it. No sequence is longer than `context_tokens`. The
environment does not see summaries. A summary is a turn of the row like any other: it is sampled, scored and trained in
the window in which it was written, with the one advantage of the episode, whatever the number of windows.

A summary that is empty or cut at its limit is used as it is, so that the student learns from the consequences; both are
counted. An episode that needs more than `most` summaries, or has no room after one, ends by `context` and has failed.

Source: arXiv 2510.06727, by notes on it. There, rollouts that hit a limit are left out of the loss but not out of the
statistics of their group, which is method episode_filter with ended [turns, tokens, context].
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from opd.tasks.turns import Answered, encode_turns
from student.settings.episodes import SummarySettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.rollout.episode import Episode

CONTEXT = "context"
"""The value of the tag `ended` for an episode that ran out of context."""


class Summaries:
    """Decides when an episode is summarised, and writes what stands around a summary.

    Args:
        settings: the limits.
        turn_tokens: maximum tokens of a turn of the student.
        tokenizer: the student's tokenizer.
        stops: ids that end a turn.
    """

    def __init__(self, settings: SummarySettings, turn_tokens: int, tokenizer: Any, stops: frozenset[int]) -> None:
        self.settings, self._turn_tokens = settings, turn_tokens
        self._tokenizer, self._stops = tokenizer, stops
        self._lengths: dict[str, int] = {}  # length of the instruction, by the framing that the prompt asks for

    def due(self, episode: Episode, coming: int) -> bool:
        """Whether, after `coming` further ids, the next turn could leave too little room for a summary.

        It is true before the room for a summary itself runs out, so that no window outgrows its limit. Once the episode
        has all the summaries it may have, only room for the turn counts.
        """
        room = self.settings.context_tokens - episode.read - coming - self._turn_tokens
        more = len(episode.summaries) < self.settings.most
        return room < (self._instruction(episode.prompt) + self.settings.tokens if more else 0)

    def ask(self, episodes: Sequence[Episode], candidates: int) -> None:
        """Write the instruction in place of the observation; episodes without a summary left end by context."""
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
        """Add the summary that the student sampled in `row` to the episode."""
        first = len(episode.ids) - episode.seen_from
        episode.summarise(row, first)
        episode.empty += not row.text.strip()
        episode.cut += int(row.response_ids[-1]) not in self._stops

    def go_on(self, episodes: Sequence[Episode], candidates: int) -> None:
        """Append the observations that waited for a summary."""
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
        """Length of the instruction with its framing; at most one id less if the turn before already has its end."""
        framing = json.dumps(
            [prompt.messages is None, prompt.template_options, prompt.tools], sort_keys=True, default=str
        )
        if framing not in self._lengths:
            asked = Answered(self.settings.instruction, prompt, ())
            self._lengths[framing] = len(encode_turns([asked], self._tokenizer, self._stops)[0])
        return self._lengths[framing]


def notes_of(episode: Episode) -> Mapping[str, float]:
    """The notes of a row: numbers of summaries, of empty and of cut ones, and the context tokens that turns saved.

    A turn saves the tokens that it would have read with the whole history, less those that it did read. Instructions
    and summaries are not part of the whole history, so the summary that the turn read counts against the saving.
    """
    return {
        "summaries": float(len(episode.summaries)),
        "summaries_empty": float(episode.empty),
        "summaries_cut": float(episode.cut),
        "context_saved": float(episode.saved),
    }
