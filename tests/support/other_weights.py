"""A student whose weights have moved."""

from typing import Any

import torch


@torch.no_grad()
def move(model: Any, factor: float = 0.8) -> None:
    """Other weights than before: each times `factor`."""
    for parameter in model.parameters():
        parameter.mul_(factor)
