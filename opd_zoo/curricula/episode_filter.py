"""Mark episodes that count in the statistics of their group but are not trained on.

    Mini-o3     ended: [turns, tokens]: an episode that ran out of turns is masked, not punished (arXiv 2509.07969)
    SimpleTIR   void: an episode with a turn that holds neither a call nor a whole code block nor an answer is left
                out (github ltzheng/SimpleTIR); bad_calls: an episode with a call that does not parse or was cut

Such episodes still count in the mean and the standard deviation of their group, as in the released code of Mini-o3. An
answer is what the verifier extracts from the turn. Evidence: text and code.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from opd.tasks.tools import parse_reply
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.controllers import Services

_CODE = re.compile(r"```.*?```", re.DOTALL)


class EpisodeFilterSettings(ControllerSettings):
    """Which episodes to leave out."""

    ended: list[str] = Field(
        default_factory=list,
        description="Ends after which an episode is not trained on, for example turns or tokens (it ran out of them).",
    )
    bad_calls: bool = Field(
        False, description="Do not train on episodes with a tool call that does not parse or was cut."
    )
    void: bool = Field(
        False, description="Do not train on episodes with a turn that holds neither a call, code block nor answer."
    )

    @model_validator(mode="after")
    def _check(self) -> EpisodeFilterSettings:
        if not (self.ended or self.bad_calls or self.void):
            raise ValueError("nothing would be left out; set ended, for example [turns], or bad_calls or void: true")
        return self


class EpisodeFilter(Controller[EpisodeFilterSettings]):
    """Excludes episodes from training by how they end (Mini-o3, SimpleTIR)."""

    traits = Traits(works_ahead=True)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mark the episodes that are not trained on."""
        void = self._void(rows) if self.settings.void else set()
        for row in rows:
            bad = id(row) in void or (self.settings.bad_calls and row.notes.get("bad_calls", 0.0) > 0)
            out = "ended" in row.tags and (row.tags["ended"] in self.settings.ended or bad)
            row.notes["filtered"] = float(out)
            row.trained = row.trained and not out
        return rows

    def _void(self, rows: Sequence[Row]) -> set[int]:
        """Ids of the episodes with a void turn."""
        tokenizer, turns = self.services.tokenizer, []
        for row in rows:
            texts = [str(tokenizer.decode(row.response_ids[a:b].tolist())) for a, b in row.actions]
            bare = [text for text in texts if not parse_reply(text).calls and not _CODE.search(text)]
            turns += [(row, replace(row, text=text)) for text in bare]
        answers = self.services.extract([turn for _, turn in turns])
        return {id(row) for (row, _), answer in zip(turns, answers, strict=True) if answer is None}

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric episodes_filtered: share of the episodes that were left out."""
        played = [outcome.notes.get("filtered", 0.0) for outcome in services.outcomes if "ended" in outcome.tags]
        return {"episodes_filtered": sum(played) / len(played)} if played else {}
