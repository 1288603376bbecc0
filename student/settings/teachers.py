"""The models that score rows, `teachers` in a recipe."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import ConfigError
from opd.fleet.membership.discovery import parse_endpoints, recorded_folder
from opd.fleet.settings import FleetSettings


class EmaSettings(Settings):
    """The exponential moving average of the student's weights, which recipes name as model `ema`."""

    decay: float = Field(
        0.999, ge=0, lt=1, description="Share of the average that each update keeps; 0 copies the student."
    )
    every: int = Field(1, ge=0, description="Steps between updates of the average; 0: only a method updates it.")
    copy_every: int = Field(
        0, ge=0, description="Steps between resets, which set the average equal to the student; 0 means never."
    )
    served: str | None = Field(
        None,
        description="Name of a served teacher that follows the student: its servers load the average before the first "
        "step and after each update of it. They must serve a model of the student's architecture (BASE+ADAPTER for a "
        "LoRA student), and the run's token needs the scope admin, which allows it to replace weights.",
    )
    folder: Path | None = Field(
        None,
        description="Folder where the average is written for those servers, which must see it under the same path. "
        "null means a folder NAME.teacher next to the run folder.",
    )
    seconds: float = Field(
        600.0,
        gt=0,
        description="Seconds that a server may take to load the average. If it takes longer, it keeps its old weights.",
    )


class TeacherSettings(Settings):
    """The models that score rows.

    Besides served models there are three in the student's process, which need no server: student (the current
    weights), initial (those of step 0) and ema (their moving average). A served model of the same name takes
    precedence.
    """

    endpoints: list[str] | dict[str, list[str]] = Field(
        default_factory=list,
        description="Addresses host:port of teacher servers, or a mapping from each teacher's name to the addresses "
        "of its replicas. An address may also be file:PATH (a list that is re-read when it changes), dns:NAME:PORT or "
        "store:FOLDER. May be omitted if the recipe names only in-process models.",
    )
    default: str | dict[str, float] | None = Field(
        None,
        description="Teacher of the prompts that do not name one, or a mapping from several teachers to their weights "
        "(see combine). May be omitted if the fleet serves a single teacher.",
    )
    combine: Literal["probability", "divergence"] = Field(
        "probability",
        description="How several weighted teachers of one row are combined. probability: into one teacher whose "
        "distribution is the weighted mean of theirs (payloads sampled and gather). divergence: the loss is the "
        "weighted sum of the divergences to each of them, with any payload (objectives opd, gopd, exopd and vopd).",
    )
    routes: dict[str, str | dict[str, float]] = Field(
        default_factory=dict,
        description="Mapping from a prompt's domain to its teacher, or to several weighted teachers.",
    )
    reference: str | None = Field(
        None,
        description="Model that objectives use as their reference (in G-OPD or a KL penalty): the name of a served "
        "model, or initial, the student's first weights.",
    )
    map_stops: bool = Field(
        False,
        description="Move the teacher's probability of ending the response to the student's stop tokens, from those "
        "stop tokens of the teacher that do not end the student's responses. Use it for a base student of a chat "
        "teacher; it needs payload sampled, gather or topk.",
    )
    ema: EmaSettings = Field(
        default_factory=EmaSettings, description="How the in-process model `ema` follows the student."
    )
    fleet: FleetSettings = Field(default_factory=FleetSettings, description="How the client uses the fleet.")

    @field_validator("endpoints")
    @classmethod
    def _addresses(cls, endpoints: list[str] | dict[str, list[str]]) -> list[str] | dict[str, list[str]]:
        try:
            if endpoints and recorded_folder(endpoints) is None:
                parse_endpoints(endpoints)
        except ConfigError as error:
            raise ValueError(str(error).rstrip(".")) from error
        return endpoints

    @property
    def several(self) -> bool:
        """Whether a row can have several teachers."""
        return any(len(to) > 1 for to in (self.default, *self.routes.values()) if isinstance(to, dict))

    @property
    def sums_divergences(self) -> bool:
        """Whether a row can have several teachers whose divergences are summed."""
        return self.combine == "divergence" and self.several
