"""Schedules of learning rates and weights, pure functions of the step: a resumed run needs no scheduler state."""

import math
from typing import Literal

from pydantic import ConfigDict, Field

from opd.config import Settings

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, warmup: int, total: int, schedule: Schedule, floor: float = 0.0) -> float:
    """The learning rate of step `step` of the run, counted from 0.

    Args:
        step: the step about to be taken.
        peak: the rate after warm-up.
        warmup: steps of linear warm-up: step 0 has peak / warmup, step `warmup` - 1 the peak.
        total: steps of the run, at the end of which linear and cosine decay end.
        schedule: what follows the warm-up.
        floor: fraction of the peak at which the decay ends, 0 to 1.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (floor + (1.0 - floor) * shape)


class WeightSchedule(Settings):
    """A weight that changes linearly from one value to another and stays there."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    start: float = Field(alias="from", description="Weight in the first step.")
    to: float = Field(description="Weight from step `steps` on.")
    steps: int = Field(ge=1, description="Number of steps over which the weight moves from `from` to `to`.")

    def at(self, step: int) -> float:
        """The weight in `step`, counted from 0."""
        done = min(1.0, step / self.steps)
        return self.start + done * (self.to - self.start)
