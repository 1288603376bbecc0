"""Copies between host and device; payloads are copied while the device computes the next forward pass.

On CUDA the host buffers are pinned and the copies asynchronous. Elsewhere they are synchronous: for other accelerators
there is no event to wait for here, so the host could read numbers that have not arrived.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.wire.types import Scores


class HostCopy:
    """The payload rows of one group of sequences, on their way to the host.

    Args:
        blocks: dictionaries of device tensors with a common first dimension, in row order. They are consumed at once,
            so that the logits of a block are freed before the next block is computed.
        rows: total number of rows.
    """

    def __init__(self, blocks: Iterable[dict[str, Tensor]], rows: int) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        first = 0
        device = torch.device("cpu")
        for block in blocks:
            count = len(block["finite"])
            for name, tensor in block.items():
                device = tensor.device
                cuda = device.type == "cuda"
                if name not in self._buffers:  # one buffer for all blocks: pinning memory is slow
                    shape = (rows, *tensor.shape[1:])
                    self._buffers[name] = torch.empty(shape, dtype=tensor.dtype, pin_memory=cuda)
                self._buffers[name][first : first + count].copy_(tensor, non_blocking=cuda)
            first += count
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            # Recorded after the copies of all blocks, so that it completes after them.
            self._event.record(torch.cuda.current_stream(device))

    def split(self, lengths: Sequence[int], weights_hash: str) -> list[Scores | None]:
        """Wait for the copies and cut the rows into one `Scores` per sequence; None for a sequence that is not finite.

        Each sequence owns its memory: the server's budget gives back a sequence once it is sent, so the row of a slow
        reader must not hold those of a whole group.
        """
        if self._event is not None:
            self._event.synchronize()
        arrays = {name: _numpy(tensor) for name, tensor in self._buffers.items()}
        finite = arrays.pop("finite")
        alone = len(lengths) == 1
        out: list[Scores | None] = []
        first = 0
        for length in lengths:
            part = slice(first, first + length)
            fields: dict[str, Any] = {name: array if alone else array[part].copy() for name, array in arrays.items()}
            out.append(Scores(**fields, weights_hash=weights_hash) if finite[part].all() else None)
            first += length
        return out


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; on CUDA, queued behind the kernels launched before it, without waiting for them."""
    return tensor.to(device, non_blocking=device.type == "cuda")


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype == torch.int32:
        return tensor.numpy().view(np.uint32)
    return tensor.numpy()
