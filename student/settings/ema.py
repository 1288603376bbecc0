"""Settings of the moving average of the student's weights: the keys under `teachers.ema`."""

from pathlib import Path

from pydantic import Field

from opd.config import Settings


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
