"""Gradients of hidden states, head and bias, accumulated from tiles of gradients on the logits.

On an accelerator, matrix units need half-precision operands. Tiles are cast into a buffer that joins several of them
before they are multiplied, because every product for the head's gradient reads and writes the whole [V, H] float32
tensor: 5 GB at V = 152k and H = 4k.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from opd.heads import has_matrix_units, vocabulary_steps
from opd.maths.linear.project import Projection, aligned_rows, rows_within, scratch_of


class LogitGradients:
    """Accumulates the gradients of hidden states, head and bias from the gradients of logit tiles.

    The gradients of head and bias are sums over tiles, kept in float32 for half-precision models. That of a hidden
    state is complete after its tile, so it is rounded to the model's dtype at once: no float32 copy grows with the
    number of tokens.

    Args:
        student: the model whose gradients are accumulated.
        wanted: whether the gradients of hidden states, head and bias are wanted.
        joined: number of tokens whose tiles are cast to the head's dtype and joined before they are multiplied; 0
            multiplies every tile at once, as it is.
    """

    def __init__(self, student: Projection, wanted: tuple[bool, bool, bool], joined: int = 0) -> None:
        def zeros(tensor: Tensor | None, want: bool) -> Tensor | None:
            if tensor is None or not want:
                return None
            return torch.zeros(tensor.shape, dtype=student.dtype, device=tensor.device)

        self.student = student
        self.d_hidden = torch.zeros_like(student.hidden) if wanted[0] else None
        self.d_head = zeros(student.head.weight, wanted[1])
        self.d_bias = zeros(student.head.bias, wanted[2])
        self._joined = aligned_rows(joined, student, student.head.weight.dtype) if joined else None
        self._waiting = slice(0, 0)

    def add(self, tile: slice, d_logits: Float[Tensor, "n V"]) -> None:
        """Adds the contribution of a tile, which must directly follow the one before.

        `d_logits` is the gradient with respect to scale * (projection + bias), times the scale. It may be overwritten
        afterwards.
        """
        if self.d_bias is not None:
            # From the tile itself, not from its half-precision copy: all tokens add to the same few numbers.
            self.d_bias += d_logits.sum(0)
        if self._joined is None:
            self._multiply(tile, d_logits)
            return
        if tile.stop - self._waiting.start > len(self._joined):  # no room for this tile
            # The joined buffer stands for one slice of the tokens, so a tile that does not fit starts a new slice.
            self._multiply_waiting()
            self._waiting = slice(tile.start, tile.start)
        at = tile.start - self._waiting.start
        self._joined[at : at + len(d_logits)] = d_logits
        self._waiting = slice(self._waiting.start, tile.stop)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of hidden states, head and bias once all tiles are added; empty tensors where not wanted."""
        self._multiply_waiting()
        hidden, wide = self.student.hidden, self.student.dtype
        return (
            hidden.new_empty(0) if self.d_hidden is None else self.d_hidden,
            hidden.new_empty(0, dtype=wide) if self.d_head is None else self.d_head,
            hidden.new_empty(0, dtype=wide) if self.d_bias is None else self.d_bias,
        )

    def _multiply_waiting(self) -> None:
        if self._joined is not None and self._waiting.stop > self._waiting.start:
            self._multiply(self._waiting, self._joined[: self._waiting.stop - self._waiting.start])
            self._waiting = slice(self._waiting.stop, self._waiting.stop)

    def _multiply(self, tokens: slice, d_logits: Float[Tensor, "n V"]) -> None:
        hidden, head = self.student.hidden[tokens], self.student.head.weight
        # In steps over the vocabulary where `_accumulate` has to widen the head, so that it is never float32 as a
        # whole.
        d_hidden = None if self.d_hidden is None else torch.zeros_like(hidden, dtype=self.student.dtype)
        whole = head.dtype == self.student.dtype or has_matrix_units(d_logits)
        for step in [slice(0, len(head))] if whole else vocabulary_steps(len(head)):
            part = d_logits[:, step]
            if d_hidden is not None:
                _accumulate(d_hidden, part, head[step])
            if self.d_head is not None:
                _accumulate(self.d_head[step], part.t(), hidden)
        if self.d_hidden is not None and d_hidden is not None:
            self.d_hidden[tokens] = d_hidden


def gradients_within(
    student: Projection, wanted: tuple[bool, bool, bool], scratch_bytes: int | None
) -> tuple[LogitGradients, int]:
    """An accumulator for a run over tiles, and how many bytes of the scratch are left for the tiles.

    Where tiles are cast (on an accelerator, in half precision), half of the scratch, or less if all tokens fit into
    less, is used to join them.
    """
    scratch = scratch_of(student, scratch_bytes)
    if not any(wanted[:2]) or not joins_tiles(student):
        return LogitGradients(student, wanted), scratch
    joined = min(rows_within(scratch // 2, student, student.head.weight.dtype), len(student.hidden))
    return LogitGradients(student, wanted, joined), scratch - scratch // 2


def joins_tiles(student: Projection) -> bool:
    """Whether gradients on the logits are cast to half precision before they are multiplied."""
    return has_matrix_units(student.head.weight) and student.head.weight.dtype != student.dtype


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Total += left @ right, summed in the dtype of `total` whatever the dtypes of the factors."""
    if right.dtype == total.dtype:
        total.addmm_(left, right)
    elif has_matrix_units(total):
        torch.addmm(total, left.to(right.dtype), right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
