"""Models whose weights have moved."""

from typing import Any

import torch


@torch.no_grad()
def move(model: Any, factor: float = 0.8) -> None:
    """Other weights than before: each times `factor`."""
    for parameter in model.parameters():
        parameter.mul_(factor)


@torch.no_grad()
def train_adapters(model: Any) -> None:
    """Give fresh adapters of LoRA, whose product is 0, an effect; the same one each time."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0.0, 0.3)
