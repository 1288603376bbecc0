"""Episodes whose student says what a script holds: an engine for `EpisodePlayer`, which remembers what it was asked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rows import make_row

from opd.config import parse_settings
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.rollout.episodes import EpisodePlayer
from student.rollout.requests import RolloutSpec
from student.settings.episodes import EpisodeSettings


def make_player(tokenizer: Any, candidates: int = 4, **settings: Any) -> EpisodePlayer:
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=candidates, valid_vocab=len(tokenizer), max_prompt_tokens=1024)
    found = parse_settings(EpisodeSettings, {"turn_tokens": 4, "isolation": "none"} | settings)
    return EpisodePlayer(found, tokenizer, spec)


def plan(prompts: Sequence[Prompt], **changes: Any) -> list[PlannedRow]:
    rows = plan_step(1, prompts, samples=1, max_new_tokens=80, temperature=1.0).rows
    return [replace(row, **changes) for row in rows]


class Scripted:
    """An engine whose student says what a script holds, turn by turn, and remembers what it was asked.

    Turns in `cut` have no end, as if the length limit had cut them.
    """

    def __init__(self, tokenizer: Any, script: dict[str, list[str]], cut: Sequence[int] = ()) -> None:
        self.tokenizer, self.script, self.cut = tokenizer, script, cut
        self.asked: list[PlannedRow] = []

    def __call__(self, planned: Sequence[PlannedRow], purpose: tuple[object, ...]) -> list[Row]:
        self.asked += planned
        return [self._row(one) for one in planned]

    def _row(self, one: PlannedRow) -> Row:
        text = self.script[one.key.uid][one.key.turn]
        prompt = encode_prompt(one.prompt, self.tokenizer)
        end = [] if one.key.turn in self.cut else [self.tokenizer.eos_token_id]
        own = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], *end]
        ids = [*one.prefix_ids, *own]
        given = len(one.prefix_ids)
        return make_row(
            ids,
            key=one.key,
            prompt=one.prompt,
            prompt_ids=np.array(prompt, dtype=np.uint32),
            behaviour=np.where(np.arange(len(ids)) < given, np.nan, -1.0),
            loss_mask=np.arange(len(ids)) >= given,
            text=text,
            candidates=np.tile(np.arange(4, dtype=np.uint32), (len(ids), 1)),
        )
