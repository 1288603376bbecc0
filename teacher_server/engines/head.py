"""The output head: hidden states to logits in f32, with the logit scale and soft-cap that some families apply.

Which config field of which family means what stands in `opd.heads`; `teacher_server.engines.probe` checks at load that
head and table reproduce the model's own logits, so that a family missing from the table is refused.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opd.wire.fingerprint import head_hash
from opd.wire.types import Head
from teacher_server.engines.base import HeadIdentity

# Vocabulary rows converted to f32 at a time where the device cannot multiply half precision into f32.
_TILE_ROWS = 16_384

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """logits = soft_cap * tanh(scale * (weight @ h + bias) / soft_cap) of the V ids that count, in f32.

    Attributes:
        weight: [R, H] in the model's dtype; R = V + padding.
        bias: [R] or None.
        scale: multiplies the projection, 1.0 for none.
        soft_cap: 0.0 for none.
        padding: rows at the end that belong to no token; they are in no logits and in no exported head.
    """

    weight: Float[Tensor, "R H"]
    bias: Float[Tensor, " R"] | None
    scale: float
    soft_cap: float
    padding: int = 0

    @property
    def vocab_size(self) -> int:
        """V, the ids that count."""
        return len(self.weight) - self.padding

    def logits(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N V"]:
        """Logits of final hidden states, f32, not divided by any temperature.

        A bf16 or f16 head is multiplied into f32: its products are not rounded back to 16 bits, as the model's own
        forward would do (by up to 0.06 at logits of 16 to 32).
        """
        out = self._project(hidden)
        if self.bias is not None:
            out += self.bias[: self.vocab_size].float()
        if self.scale != 1.0:
            out *= self.scale
        if self.soft_cap:
            out.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return out

    def _project(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N V"]:
        if self.weight.is_cuda:
            # All rows, cut afterwards: heads are padded because odd widths keep the GPU from its fast kernels.
            if self.weight.dtype == torch.float32:
                return (hidden.float() @ self.weight.T)[:, : self.vocab_size]
            whole = torch.mm(hidden.to(self.weight.dtype), self.weight.T, out_dtype=torch.float32)
            return whole[:, : self.vocab_size]
        weight = self.weight[: self.vocab_size]
        if weight.dtype == torch.float32:
            return hidden.float() @ weight.T
        # Not torch's default dtype: a model that is being loaded on another thread sets it, for all threads.
        out = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
        rows = hidden.float()
        for first in range(0, len(weight), _TILE_ROWS):
            tile = weight[first : first + _TILE_ROWS]
            out[:, first : first + len(tile)] = rows @ tile.float().T
        return out

    def identity(self) -> HeadIdentity:
        """Its description, with the content hash."""
        return HeadIdentity(
            hash=head_hash(self.export("")),
            hidden_size=self.weight.shape[1],
            logit_scale=self.scale,
            soft_cap=self.soft_cap,
            dtype=DTYPE_NAMES[self.weight.dtype],
            has_bias=self.bias is not None,
        )

    def export(self, content_hash: str) -> Head:
        """The head as numpy arrays, for callers of the payload hidden; on the CPU they share the weights' memory."""
        counted = slice(self.vocab_size)
        return Head(
            weight=to_numpy(self.weight[counted]),
            bias=None if self.bias is None else to_numpy(self.bias[counted]),
            dtype=DTYPE_NAMES[self.weight.dtype],
            logit_scale=self.scale,
            soft_cap=self.soft_cap,
            hash=content_hash,
        )


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor on any device as a contiguous array, a view where that is possible; bfloat16 as its bits in uint16."""
    host = tensor.detach().to("cpu").contiguous()
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
