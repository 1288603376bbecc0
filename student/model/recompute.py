"""Gradient checkpointing: layers keep only their inputs, and run forward again in the backward pass.

transformers' own acts in train mode alone, in which dropout acts too. This one acts wherever gradients are taken.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from opd.errors import ConfigError
from student.data.hooks import decoder_layers


class _Recomputed:
    """Comes before a layer's own class: a call of the layer is checkpointed, with the hooks on the layer."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        run: Any = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*inputs, **named)
        # The reentrant form passes no gradient if its inputs need none, which is so above frozen embeddings.
        return checkpoint(partial(run, **named), *inputs, use_reentrant=False)


def recompute(lm: PreTrainedModel) -> Callable[[], None]:
    """Checkpoint every layer of `lm`, in place and before it is sharded.

    Returns:
        A callback that undoes it.

    Raises:
        ConfigError: if transformers does not say which modules the layers are.
    """
    layers = layers_of(lm)
    if not layers:
        raise ConfigError(
            f"model.gradient_checkpointing is true, but transformers does not say what the layers of a "
            f"{type(lm).__name__} are; set it to false, and lower train.micro_batch_tokens if memory is short."
        )
    kinds = [type(layer) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        # A class instead of a function on the layer, which a copy of the model would share.
        layer.__class__ = type(kind.__name__, (_Recomputed, kind), {})

    def undo() -> None:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind

    return undo


def layers_of(lm: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers would checkpoint, or else the decoder layers, without those within another."""
    layers = [m for m in lm.modules() if isinstance(m, GradientCheckpointingLayer)] or decoder_layers(lm)
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]
