"""The optimizer of a run, and its state as a checkpoint holds it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from student.model.adamw_8bit import AdamW8bit
from student.model.sharding import placed
from student.settings.train import TrainSettings


def make_optimizer(
    groups: list[dict[str, Any]], settings: TrainSettings, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW over groups of parameters on `device`, fused on CUDA: there torch's default copies all second moments."""
    if settings.optimizer == "adamw_8bit":
        return AdamW8bit(groups, lr=settings.learning_rate, betas=settings.betas)
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=fused)


def restored(optimizer: torch.optim.Optimizer, moments: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The state of a parameter from that in a checkpoint.

    The number of steps is a scalar and, unlike moments and scales, not sharded like its parameter. A fused optimizer
    counts on the parameter's device, others on the host.
    """
    state = {key: placed(value, parameter) for key, value in moments.items() if key != "step"}
    steps = moments["step"]
    fused = optimizer.defaults.get("fused")
    return {"step": steps.to(parameter.device, copy=True) if fused else copy.deepcopy(steps)} | state
