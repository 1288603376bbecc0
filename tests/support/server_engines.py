"""What tests of engines on rollout servers do with them."""

import numpy as np
import torch

from student.data.row import Row
from student.rollout.servers.engine import ServersEngine


def sync(engine: ServersEngine, version: int = 1) -> None:
    """Have the servers hold the student's weights as they are."""
    engine.sync([(n, p) for n, p in engine.setup.model.named_parameters() if p.requires_grad], version)


def ids(rows: list[Row]) -> list[list[int]]:
    """The tokens of each row."""
    return [row.response_ids.tolist() for row in rows]


def check(engine: ServersEngine, rows: list[Row]) -> None:
    """That log-probs are those of the student as it is."""
    for row in rows:
        whole = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = engine.setup.model(whole).logits[0, :-1, : engine.setup.spec.valid_vocab]
        logp = logits.log_softmax(-1).gather(-1, whole[0, 1:, None])[-row.length :, 0]
        np.testing.assert_allclose(row.behaviour_logp, logp.numpy(), atol=1e-3)
