"""Row blocks: a pass over [N, V] works on a few rows at a time, so that its temporaries stay small."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Entries of a block. On a CPU its float32 temporaries (1 MiB each) fit into the cache. On a GPU (64 MiB each) they are
#: small beside the logit tiles, and the block is large enough that the work on it outweighs the launch of a kernel.
_CPU_BLOCK, _GPU_BLOCK = 1 << 18, 1 << 24


def row_blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices that cover the rows of a [N, V] tensor, in blocks whose size suits its device; at least one row each."""
    rows, columns = tensor.shape
    limit = _CPU_BLOCK if tensor.device.type == "cpu" else _GPU_BLOCK
    step = max(1, limit // max(columns, 1))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when every tensor is float64, else float32: half precision is accumulated in single."""
    return torch.float64 if all(t.dtype == torch.float64 for t in tensors) else torch.float32


def flat_rows(tensor: Tensor) -> Tensor:
    """[..., V] reshaped to [N, V]: a view if the leading axes allow it, else a copy."""
    return tensor.reshape(-1, tensor.shape[-1])


def select_rows(mask: Tensor | None, block: slice) -> Tensor | None:
    """The block's rows of `mask` as a column [n, 1], or None."""
    return None if mask is None else mask[block].unsqueeze(-1)
