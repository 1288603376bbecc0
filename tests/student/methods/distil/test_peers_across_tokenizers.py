"""What the losses of other trainers give in a small world, whose numbers their own code printed, and what ours gives.

The text "ab." is ab, . to the student (tokens a, b, ab, .) and a, b, . to the teacher (tokens a, b, .). Row k of the
logits predicts token k; TRL's merges are those of trl 1.16, experimental/gold.
"""

import pytest
import torch
from torch import Tensor

from opd.maths import score_tokens, span_reverse_kl

STUDENT = torch.tensor([[0.5, 0.1, 1.2, -0.3], [0.2, -0.4, 0.3, 1.5], [0, 0, 0, 0]], dtype=torch.float64)
TEACHER = torch.tensor([[1, 0.2, -0.5], [0.1, 1.4, 0.3], [-0.2, 0.4, 1.1], [0, 0, 0]], dtype=torch.float64)
MATCHED = [0, 1, 3], [0, 1, 2]


def merged(student: Tensor, merge: str) -> tuple[list[Tensor], list[Tensor]]:
    """Probabilities of the spans ab and . as TRL merges them: "observed", its default, or "bayesian"."""
    s, t = student.softmax(-1), TEACHER.softmax(-1)
    if merge == "observed":  # rows begin at the answer's token, which they no longer predict
        return [s[1], s[2]], [t[1] * t[2, 1], t[3]]
    return [s[0], s[1]], [t[1] * t[0, 0], t[2]]


def uld(student: Tensor, merge: str) -> Tensor:
    """Distance of the sorted probabilities."""
    parts = [
        (s.sort(descending=True)[0] - torch.nn.functional.pad(t.sort(descending=True)[0], (0, 1))).abs().sum()
        for s, t in zip(*merged(student, merge), strict=True)
    ]
    return torch.stack(parts).mean()


def hybrid(student: Tensor, merge: str) -> Tensor:
    """Reverse KL on equal tokens (beta 1); the others have weight 0, as all of the teacher's tokens have an equal."""
    parts = []
    for s, t in zip(*merged(student, merge), strict=True):
        p, q = s[MATCHED[0]], t[MATCHED[1]]
        parts.append((p * (p / q).log()).sum())
    return torch.stack(parts).mean()


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def ours(student: Tensor) -> Tensor:
    log_t = TEACHER.log_softmax(-1)
    spoken = torch.stack([log_t[0, 0] + log_t[1, 1], log_t[2, 2]])
    scores = score_tokens(student[:2], sampled_ids=torch.tensor([2, 3]))
    return span_reverse_kl(scores, torch.arange(2), spoken).total


def test_trls_default_has_no_gradient_at_the_first_token_of_an_answer() -> None:
    leaf = STUDENT.clone().requires_grad_()
    loss = uld(leaf, "observed")
    assert loss.item() == pytest.approx(0.609652, abs=1e-6)
    assert (gradient(loss, leaf)[0] == 0).all()
    leaf = STUDENT.clone().requires_grad_()
    assert (gradient(ours(leaf), leaf)[0] != 0).any()


def test_trls_other_merge_gives_negative_divergences_and_a_gradient_of_zero() -> None:
    leaf = STUDENT.clone().requires_grad_()
    loss = uld(leaf, "bayesian")
    assert loss.item() == pytest.approx(0.306958, abs=1e-6)
    assert gradient(loss, leaf)[0].abs().max() < 1e-12
    assert hybrid(STUDENT, "bayesian").item() == pytest.approx(-0.010741, abs=1e-6)
    assert ours(STUDENT).item() == pytest.approx(0.294812, abs=1e-6)
