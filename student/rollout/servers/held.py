"""The student's current weights, read again for each server that they are sent to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from student.rollout.held_update import HeldUpdate
from student.rollout.servers.folder import digests_of, label_of
from student.rollout.weights import checkpoint_tensors


class HeldWeights:
    """Iterates over names and tensors of the saved model; only one tensor at a time is copied.

    Args:
        model: the student.
        parameters: trained parameters by name, which replace the model's own of the same name. They must not change
            while a server may still have to be sent the weights.
        dtype: dtype in which floating-point tensors are sent.
        held: looks at the weights once, before they are rounded.

    Attributes:
        found: name, type and shape of each tensor, in the order of iteration.
        label: hash of the weights, equal to that of a folder with the same weights.
        device: the student's device.
    """

    def __init__(
        self, model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]], dtype: str, held: HeldUpdate
    ) -> None:
        self._model, self._given = model, dict(parameters)
        self._kind: torch.dtype = getattr(torch, dtype)
        self.device = model.device
        self.found: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        digests: dict[str, str] = {}
        for name, tensor in self._rounded(held.through(checkpoint_tensors(model, self._given.items()))):
            self.found.append((name, tensor.dtype, tuple(tensor.shape)))
            digests |= digests_of({name: tensor.cpu()})
        self.label = label_of(digests)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._rounded(checkpoint_tensors(self._model, self._given.items()))

    def _rounded(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor.to(self._kind if tensor.is_floating_point() else tensor.dtype).contiguous()
