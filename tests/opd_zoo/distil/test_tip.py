"""Which tokens TIP chooses, against its scores by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from student.data.needs import TEACHER
from student.plugin.terms import build_terms

SCORES = {
    "entropy": lambda h, d: h,
    "divergence": lambda h, d: d,
    "soft_or": lambda h, d: h + d - h * d,
}


def spread(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def chosen(made: Any, score: str, share: float) -> Tensor:
    """The best `share` of each response, entropies and KL(T || S) scaled to [0, 1] within it."""
    log_p, log_q = made.logp(made.hidden, made.head).detach(), made.logp(*made.models[TEACHER])
    entropy, divergence = -(log_p.exp() * log_p).sum(-1), (log_q.exp() * (log_q - log_p)).sum(-1)
    found = torch.zeros(len(entropy), dtype=torch.bool)
    for row in made.row.unique():
        mine = (made.row == row).nonzero()[:, 0]
        rank = SCORES[score](spread(entropy[mine]), spread(divergence[mine]))
        found[mine[rank.argsort(descending=True)[: math.ceil(share * len(mine))]]] = True
    return found


@pytest.mark.parametrize("payload", ["gather", "topk"])
@pytest.mark.parametrize("score", SCORES)
def test_the_tokens_with_the_highest_score_are_learnt_from(toy: Any, score: str, payload: str) -> None:
    made = toy(lengths=(6, 6, 6, 6), masked=False, seed=1)
    made.k = made.vocab  # the teacher's list is the vocabulary too
    made.candidates = torch.arange(made.vocab).expand(len(made.hidden), -1)
    wanted = {name: chosen(made, name, 0.5) for name in SCORES}
    assert len({tuple(mask.tolist()) for mask in wanted.values()}) == 3
    (term,) = build_terms([{"name": "tip", "score": score, "payload": payload, "k": made.vocab, "retention": 0.5}])
    found = (made.gradient([term])[0] != 0).any(-1)
    assert found.tolist() == wanted[score].tolist()
