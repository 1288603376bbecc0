"""Gaussian noise on the input of every decoder layer, with a learnt scale per layer; active within `LayerNoise.on`.

    h_l <- h_l + exp(log_size_l) eps_l,   eps_l ~ N(0, I) from a random stream per sequence, layer and update

A sequence's noise does not depend on its micro-batch or rank, and is the same when a step is taken again or the
backward pass recomputes a checkpointed layer.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from student.data.hooks import Reading, decoder_layers
from student.data.streams import stream


class LayerNoise(nn.Module):
    """Noise with a trainable scale per layer; see the module docstring.

    Args:
        lm: the model; a hook is registered on each of its decoder layers.
        size: initial standard deviation, in units of the hidden states.

    Attributes:
        log_sizes: [layers] float32, natural logarithms of the standard deviations; trained.
    """

    def __init__(self, lm: PreTrainedModel, size: float) -> None:
        super().__init__()
        layers = decoder_layers(lm)
        self.log_sizes = nn.Parameter(torch.full((len(layers),), math.log(size)))
        self._keys: list[int] | None = None
        self._lengths: Sequence[int] = ()
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._hook, index), with_kwargs=True)

    @contextmanager
    def on(self, reading: Reading, seed: int) -> Iterator[None]:
        """Add noise within the block, to a forward pass and to what its backward pass recomputes.

        Args:
            reading: what the forward pass reads.
            seed: the run's seed.
        """
        draws = (stream(seed, "layer noise", reading.update, name) for name in reading.names)
        self._keys, self._lengths = [int(draw.integers(2**62)) for draw in draws], reading.lengths
        try:
            yield
        finally:
            self._keys = None

    def _hook(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._keys is None:
            return None
        # Checkpointed, because the gradient of a scale needs its noise, which is as large as the hidden states.
        add = partial(self._add, keys=[key + index for key in self._keys], lengths=self._lengths)
        size = self.log_sizes[index].exp()
        if args:
            return (checkpoint(add, args[0], size, use_reentrant=False), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": checkpoint(add, kwargs["hidden_states"], size, use_reentrant=False)}

    @staticmethod
    def _add(
        hidden: Float[Tensor, "b l h"], size: Float[Tensor, ""], keys: Sequence[int], lengths: Sequence[int]
    ) -> Float[Tensor, "b l h"]:
        noise = torch.zeros_like(hidden)
        for sequence, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            # Drawn for the sequence's own tokens only: noise for padding would make it depend on its neighbours.
            generator = torch.Generator(hidden.device).manual_seed(key)
            drawn = torch.randn(length, hidden.shape[-1], generator=generator, device=hidden.device)
            noise[sequence, :length] = drawn
        return hidden + (size * noise).to(hidden.dtype)
