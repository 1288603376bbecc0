"""Experiment trackers, `trackers` in a recipe."""

from typing import Any, Literal

from pydantic import Field

from opd.config import Settings


class TrackerSettings(Settings):
    """A tracker; its package comes with the extra `trackers`."""

    name: Literal["tensorboard", "trackio", "wandb", "mlflow"] = Field(description="Name of the tracker.")
    project: str = Field("opd", description="Name of the project or experiment that the run belongs to.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments with which the tracker is started, for example mode: offline (wandb).",
    )
