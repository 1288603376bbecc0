"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, warmup: int, total: int, schedule: Schedule, floor: float = 0.0) -> float:
    """The learning rate of optimizer step `step` (the first is 0).

    Args:
        step: step about to be taken.
        peak: rate after warm-up.
        warmup: steps of linear warm-up; the first step has peak / warmup, step `warmup` has the peak.
        total: steps of the run; linear and cosine decay end there.
        schedule: what follows the warm-up.
        floor: fraction of the peak at which decay ends, 0 to 1.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    shape = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (floor + (1.0 - floor) * shape)
