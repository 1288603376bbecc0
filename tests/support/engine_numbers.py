"""The numbers that an engine gave: their bits, and how far they are from those of logits."""

import hashlib

import numpy as np
import torch

from opd.wire.types import ScoreItem, Scores


def bits(scores: Scores | None) -> str:
    assert scores is not None
    digest = hashlib.sha256()
    for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
        array = getattr(scores, name)
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def close(scores: Scores | None, logits: torch.Tensor, item: ScoreItem, atol: float = 2e-4) -> None:
    assert scores is not None and scores.sampled is not None
    targets = torch.from_numpy(item.response_ids.astype(np.int64))[:, None]
    expected = torch.log_softmax(logits, -1).gather(-1, targets).squeeze(-1)
    np.testing.assert_allclose(scores.sampled, expected.numpy(), atol=atol)
