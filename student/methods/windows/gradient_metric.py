"""Vectors that stand for gradients when only inner products of gradients are needed.

full          every trained parameter: exact, P floats per vector
sketch        a count sketch of m buckets: parameter i adds sign(i) g_i to bucket i mod m. Inner products are
              unbiased over the random signs, with a variance of at most 2 |a|^2 |b|^2 / m for generic gradients
last_layers   only the parameters of the last decoder layers: exact for these, ignores the rest
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from student.model.sharding import full, layer_of

MetricName = Literal["full", "sketch", "last_layers"]
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class GradientMetric:
    """Which vectors stand for gradients.

    Attributes:
        name: full, sketch or last_layers; see the module docstring.
        buckets: number of buckets m of the sketch.
        layers: number of last decoder layers.
        seed: seed of the sketch's signs.
    """

    name: MetricName = "full"
    buckets: int = 1 << 16
    layers: int = 1
    seed: int = 0

    def vector(self, named: Iterable[tuple[str, Tensor]]) -> Float[Tensor, " m"]:
        """The float32 vector of the gradients in `.grad` of the named parameters; a missing gradient is zero."""
        parameters = list(named)
        if self.name == "last_layers":
            parameters = list(_last(parameters, self.layers))
        if self.name == "sketch":
            return self._sketch(parameters)
        return torch.cat([_gradient(p).flatten().float() for _, p in parameters])

    def _sketch(self, parameters: list[tuple[str, Tensor]]) -> Float[Tensor, " m"]:
        device = parameters[0][1].device
        # Signs are drawn on the CPU, so that they are the same on all devices and for all segments.
        generator = torch.Generator().manual_seed(self.seed)
        sketch = torch.zeros(self.buckets, device=device)
        for _, parameter in parameters:
            flat = _gradient(parameter).flatten().float()
            for start in range(0, len(flat), _CHUNK):
                piece = flat[start : start + _CHUNK]
                bits = torch.randint(0, 2, (len(piece),), generator=generator, dtype=torch.int8)
                signed = piece * (2.0 * bits.to(device) - 1.0)
                padded = torch.nn.functional.pad(signed, (0, -len(signed) % self.buckets))
                sketch += padded.view(-1, self.buckets).sum(0)
        return sketch


def _gradient(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return full(grad.detach())


def _last(parameters: list[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the last `count` decoder layers.

    Raises:
        ValueError: if no parameter's name contains the index of a layer.
    """
    layers = {name: layer for name, _ in parameters if (layer := layer_of(name)) is not None}
    if not layers:
        raise ValueError(
            "the parameters have no names like layers.3., from which metric last_layers knows its layers; use metric "
            "full or sketch"
        )
    first = max(layers.values()) - count + 1
    return (pair for pair in parameters if layers.get(pair[0], -1) >= first)


def gram(vectors: Float[Tensor, "r m"]) -> Float[Tensor, "r r"]:
    """All inner products, in float64 on the CPU; summed in pieces, without a float64 copy of all vectors."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, vectors.shape[1], _CHUNK):
        piece = vectors[:, start : start + _CHUNK].double()
        total += (piece @ piece.T).cpu()
    return total
