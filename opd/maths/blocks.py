"""Row blocks: every pass over [N, V] works on a few rows at a time, so its temporaries stay small."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Entries of one block. A CPU's cache keeps its float32 temporaries (1 MiB each); on a GPU (64 MiB each) they are small
#: beside the tiles, and sweeping one takes longer than launching a kernel.
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24


def row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of a [N, V] tensor in blocks that suit its device; at least one row each."""
    rows, columns = tensor.shape
    limit = _CPU_BLOCK if tensor.device.type == "cpu" else _GPU_BLOCK
    step = max(1, limit // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when every tensor is float64, else float32: half precision is accumulated in single."""
    return torch.float64 if all(t.dtype == torch.float64 for t in tensors) else torch.float32


def flat_rows(tensor: Tensor) -> Tensor:
    """[..., V] as [N, V], a view when the leading axes allow it."""
    return tensor.reshape(-1, tensor.shape[-1])


def select_rows(mask: Tensor | None, block: slice) -> Tensor | None:
    """The block's rows of `mask` as a column [n, 1], or None."""
    return None if mask is None else mask[block].unsqueeze(-1)
