"""Mark episodes that count in the statistics of their group but are not trained on.

    Mini-o3     ended: [turns, tokens]: an episode that ran out of turns is masked, not punished (arXiv 2509.07969)
    SimpleTIR   bad_calls: an episode with a turn that holds no valid call is left out (github ltzheng/SimpleTIR)

Such episodes still count in the mean and the standard deviation of their group, as in the released code of Mini-o3.
SimpleTIR looks for turns with neither a complete code block nor an answer; here it is a turn whose call does not parse
or was cut. Evidence: text and code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services


class EpisodeFilterSettings(ControllerSettings):
    """Which episodes to leave out."""

    ended: list[str] = Field(
        default_factory=list,
        description="Ends after which an episode is not trained on, for example turns or tokens (it ran out of them).",
    )
    bad_calls: bool = Field(
        False, description="Do not train on episodes with a tool call that does not parse or was cut."
    )

    @model_validator(mode="after")
    def _check(self) -> EpisodeFilterSettings:
        if not self.ended and not self.bad_calls:
            raise ValueError("nothing would be left out; set ended, for example [turns], or bad_calls: true")
        return self


class EpisodeFilter(Controller[EpisodeFilterSettings]):
    """Excludes episodes from training by how they end (Mini-o3, SimpleTIR)."""

    traits = Traits(works_ahead=True)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mark the episodes that are not trained on."""
        for row in rows:
            bad = self.settings.bad_calls and row.notes.get("bad_calls", 0.0) > 0
            out = "ended" in row.tags and (row.tags["ended"] in self.settings.ended or bad)
            row.notes["filtered"] = float(out)
            row.trained = row.trained and not out
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric episodes_filtered: share of the episodes that were left out."""
        played = [outcome.notes.get("filtered", 0.0) for outcome in services.outcomes if "ended" in outcome.tags]
        return {"episodes_filtered": sum(played) / len(played)} if played else {}
