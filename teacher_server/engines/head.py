"""A teacher's output head as `Describe` names it, and as clients that take hidden states receive it.

`opd.heads` has the formula of a head and the config fields that hold scale and soft-cap in each family.
`teacher_server.engines.abilities` checks at loading that they reproduce the model's own logits, so a family that is
missing there is refused.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.heads import OutputHead
from opd.wire.fingerprint import head_hash
from opd.wire.types import Head
from teacher_server.engines.base import HeadIdentity

DTYPE_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def identity_of(head: OutputHead) -> HeadIdentity:
    """The description of a head, with its content hash."""
    return HeadIdentity(
        hash=head_hash(export(head, "")),
        hidden_size=head.weight.shape[1],
        logit_scale=head.scale,
        soft_cap=head.soft_cap,
        dtype=DTYPE_NAMES[head.weight.dtype],
        has_bias=head.bias is not None,
    )


def export(head: OutputHead, content_hash: str) -> Head:
    """The rows that count, as numpy arrays; for a head on the CPU they share its memory."""
    counted = slice(head.vocab_size)
    return Head(
        weight=to_numpy(head.weight[counted]),
        bias=None if head.bias is None else to_numpy(head.bias[counted]),
        dtype=DTYPE_NAMES[head.weight.dtype],
        logit_scale=head.scale,
        soft_cap=head.soft_cap,
        hash=content_hash,
    )


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor on any device as a contiguous array, a view if possible; bfloat16 as its bits in uint16."""
    host = tensor.detach().to("cpu").contiguous()
    return host.view(torch.uint16).numpy() if host.dtype == torch.bfloat16 else host.numpy()
