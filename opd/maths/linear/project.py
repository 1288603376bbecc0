"""Logits of one model from hidden states and head, in tiles of tokens: the basis of every linear function."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from opd.heads import OutputHead, has_matrix_units

#: Default scratch of the tiles, bytes.
CPU_SCRATCH, GPU_SCRATCH = 128 << 20, 1 << 30
#: Rows that an accelerator's matrix units process at once; a smaller tile leaves some of them idle.
_ROWS = 128
#: Rows of logits are padded to a multiple of this many entries: matrix units read only rows aligned to 16 bytes.
_COLUMNS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Hidden states and head of one model, from which logits are computed tile by tile.

    Attributes:
        hidden: [N, H] after the final norm.
        head: the head that projects them, cut to the V ids that count.
    """

    hidden: Float[Tensor, "N H"]
    head: OutputHead

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits and gradients: float32, or float64 for float64 hidden states."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def write(self, tile: slice, out: Float[Tensor, "n V"]) -> None:
        """Writes a tile's logits to `out`, accumulated in float32 even for half-precision inputs."""
        self.head.logits(self.hidden[tile], out)


def scratch_of(model: Projection, scratch_bytes: int | None) -> int:
    """Bytes that the tiles may take: as asked, or else the device's default."""
    return scratch_bytes or (GPU_SCRATCH if has_matrix_units(model.hidden) else CPU_SCRATCH)


def tiles_of(model: Projection, buffers: int, scratch_bytes: int) -> Iterator[tuple[slice, list[Float[Tensor, "n V"]]]]:
    """Tiles of tokens with their logit buffers, which are reused by every tile and together fit into `scratch_bytes`.

    Args:
        model: gives the number of tokens, the vocabulary, dtype and device.
        buffers: number of [n, V] buffers per tile.
        scratch_bytes: bound on all buffers together; a tile has at least one token in any case.
    """
    tokens = len(model.hidden)
    # Tiles of even size first, so that the last one is not a small remainder; then, for matrix units, rounded up to
    # multiples of the rows that they process at once.
    most = rows_within(scratch_bytes // buffers, model, model.dtype)
    rows = max(1, -(-tokens // -(-tokens // most))) if tokens else 1
    if has_matrix_units(model.hidden) and most >= _ROWS:
        rows = min(-(-rows // _ROWS), most // _ROWS) * _ROWS
    held = [aligned_rows(rows, model, model.dtype) for _ in range(buffers)]
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        yield slice(start, stop), [buffer[: stop - start] for buffer in held]


def aligned_rows(rows: int, model: Projection, dtype: torch.dtype) -> Float[Tensor, "n V"]:
    """An uninitialised [rows, V] buffer; for matrix units, its rows are a multiple of `_COLUMNS` entries apart."""
    # Allocated at the padded width and cut to V: a view, so that the distance between rows stays aligned.
    return torch.empty(rows, _width(model), dtype=dtype, device=model.hidden.device)[:, : model.head.vocab_size]


def rows_within(scratch_bytes: int, model: Projection, dtype: torch.dtype) -> int:
    """How many rows of `aligned_rows` fit into `scratch_bytes`; at least one."""
    return max(1, scratch_bytes // (dtype.itemsize * _width(model)))


def _width(model: Projection) -> int:
    vocabulary = model.head.vocab_size
    return -(-vocabulary // _COLUMNS) * _COLUMNS if has_matrix_units(model.hidden) else vocabulary
