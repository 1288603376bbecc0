"""Logits of one model from hidden states and head, a tile of tokens at a time, on which every linear function works."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from opd.heads import OutputHead, has_matrix_units

#: Default scratch of the tiles, bytes.
CPU_SCRATCH, GPU_SCRATCH = 128 << 20, 1 << 30
#: An accelerator's matrix units work on this many rows at once; a tile of fewer wastes the rest.
_ROWS = 128
#: Entries to which an accelerator's rows of logits are padded: its matrix units read rows aligned to 16 bytes only.
_COLUMNS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """One model's logits before they are computed.

    Attributes:
        hidden: [N, H] after the final norm.
        head: what projects them, cut to the V ids that count.
    """

    hidden: Float[Tensor, "N H"]
    head: OutputHead

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and gradients: float32, or float64 for float64 hidden states."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    def write(self, tile: slice, out: Float[Tensor, "n V"]) -> None:
        """Writes a tile's logits, float32 accumulation also for half-precision inputs."""
        self.head.logits(self.hidden[tile], out)


def scratch_of(model: Projection, scratch_bytes: int | None) -> int:
    """Bytes that tiles may take: what was asked for, or the device's default."""
    return scratch_bytes or (GPU_SCRATCH if has_matrix_units(model.hidden) else CPU_SCRATCH)


def tiles_of(model: Projection, buffers: int, scratch_bytes: int) -> Iterator[tuple[slice, list[Float[Tensor, "n V"]]]]:
    """Tiles of tokens with their logit buffers, which are reused from tile to tile and fit `scratch_bytes` together.

    Args:
        model: gives tokens, vocabulary, dtype and device.
        buffers: how many [n, V] buffers a tile needs.
        scratch_bytes: bound on all of them. At least one token per tile.
    """
    tokens = len(model.hidden)
    # First tiles of even size, so that the last one is not a remainder; then, for matrix units, whole multiples of what
    # they work on.
    most = rows_within(scratch_bytes // buffers, model, model.dtype)
    rows = max(1, -(-tokens // -(-tokens // most))) if tokens else 1
    if has_matrix_units(model.hidden) and most >= _ROWS:
        rows = min(-(-rows // _ROWS), most // _ROWS) * _ROWS
    held = [aligned_rows(rows, model, model.dtype) for _ in range(buffers)]
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        yield slice(start, stop), [buffer[: stop - start] for buffer in held]


def aligned_rows(rows: int, model: Projection, dtype: torch.dtype) -> Float[Tensor, "n V"]:
    """An uninitialised [rows, V] buffer; for matrix units its rows lie a multiple of `_COLUMNS` entries apart."""
    # Rows are allocated at the padded width and cut to V: a view, so that the distance between rows stays aligned.
    return torch.empty(rows, _width(model), dtype=dtype, device=model.hidden.device)[:, : model.head.vocab_size]


def rows_within(scratch_bytes: int, model: Projection, dtype: torch.dtype) -> int:
    """How many `aligned_rows` fit; at least one."""
    return max(1, scratch_bytes // (dtype.itemsize * _width(model)))


def _width(model: Projection) -> int:
    vocabulary = model.head.vocab_size
    return -(-vocabulary // _COLUMNS) * _COLUMNS if has_matrix_units(model.hidden) else vocabulary
