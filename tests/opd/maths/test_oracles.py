"""Cross-checks with TRL 1.16 and Liger, in their own environment: `make oracles`. Skipped where they are missing."""

import math

import pytest
import torch
from torch.testing import assert_close

from opd.heads import OutputHead
from opd.maths.exact import forward_kl, jsd, reverse_kl
from opd.maths.linear.divergence import linear_divergence
from opd.maths.topk import topk_divergence

pytestmark = pytest.mark.oracle
N, V = 7, 40
SAME = {"rtol": 1e-5, "atol": 1e-5}


def ours(student, teacher, beta, temperature=1.0):
    """TRL's beta in our names: its ends are the KLs."""
    if beta == 0:
        return forward_kl(student, teacher, temperature=temperature)
    if beta == 1:
        return reverse_kl(student, teacher, temperature=temperature)
    return jsd(student, teacher, beta=beta, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.25, 0.5, 1.0])
def test_trls_gkd_loss_agrees_in_value_and_gradient(beta, temperature, make_logits):
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    teacher = make_logits(1, N, V, seed=2).float()
    leaves = [make_logits(1, N, V, seed=1).float().requires_grad_() for _ in range(2)]
    labels = torch.zeros(1, N, dtype=torch.int64)
    want = trainer.generalized_jsd_loss(leaves[0], teacher, labels=labels, beta=beta, temperature=temperature)
    got = ours(leaves[1], teacher, beta, temperature).mean
    assert_close(got, want, **SAME)
    want.backward()
    got.backward()
    assert_close(leaves[1].grad, leaves[0].grad, **SAME)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_trls_chunked_divergence_agrees_with_soft_cap_scale_bias_and_another_width(beta, make_logits):
    function = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    shapes = [(N, 6), (V, 6), (V,), (N, 4), (V, 4)]
    parts = [[make_logits(*shape, seed=i).float() for i, shape in enumerate(shapes)] for _ in range(2)]
    for side in parts:
        for leaf in side[:3]:
            leaf.requires_grad_()
    hidden, head, bias, *teacher = parts[0]
    want, entropy = function.apply(hidden, head, bias, *teacher, None, beta, 0.8, 1.3, 5.0, 1.0, None)
    hidden, head, bias, *teacher = parts[1]
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    got = linear_divergence(
        hidden,
        OutputHead(head, bias, 1.3, 5.0),
        *teacher,
        kind=kind,
        weight=beta if kind == "jsd" else None,
        temperature=0.8,
    )
    assert_close(got.per_token, want, **SAME)
    assert_close(got.student_entropy, entropy, **SAME)
    got.mean.backward()
    want.mean().backward()
    for mine, theirs in zip(parts[1][:3], parts[0][:3], strict=True):
        assert_close(mine.grad, theirs.grad, **SAME)


def bucketed_by_trl(student, teacher, ids, beta):
    module = pytest.importorskip("trl.experimental.iw_opd.iw_opd_trainer")
    valid = torch.ones_like(ids, dtype=torch.bool)
    sides, mask = [], None
    for logits in (student, teacher):
        sides_with_tail = module._add_tail_bucket(logits.log_softmax(-1).gather(-1, ids), valid)
        log_probs, mask = sides_with_tail if isinstance(sides_with_tail, tuple) else (sides_with_tail, None)
        sides.append(log_probs)
    mask = torch.ones_like(sides[0], dtype=torch.bool) if mask is None else mask
    return module._jsd_divergence(*sides, beta, mask).sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_trls_tail_bucket_agrees_where_the_tail_is_wide(beta, make_logits):
    student, teacher = make_logits(N, V, seed=3).float(), make_logits(N, V, seed=4).float()
    ids = teacher.topk(5).indices
    log_q = teacher.log_softmax(-1)
    tail = log_q.scatter(1, ids, -torch.inf).logsumexp(-1)
    assert tail.exp().min() > 1e-4
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    got = topk_divergence(student, ids, log_q.gather(1, ids), tail, kind=kind, weight=beta if kind == "jsd" else None)
    assert_close(got.per_token, bucketed_by_trl(student, teacher, ids, beta), **SAME)


def test_trls_tail_bucket_loses_the_gradient_of_a_saturated_student_and_ours_does_not():
    student = torch.tensor([[24.0, 0.0, 0.5, -1.0]])
    log_q = torch.tensor([[0.0, 0.3, 0.1, 0.2]]).log_softmax(-1)
    ids, tail = torch.tensor([[0]]), log_q[:, 1:].logsumexp(-1)
    exact, mine, theirs = (
        student.to(d, copy=True).requires_grad_() for d in (torch.float64, torch.float32, torch.float32)
    )
    topk_divergence(exact, ids, log_q[:, :1].double(), tail.double()).total.backward()
    topk_divergence(mine, ids, log_q[:, :1], tail).total.backward()
    bucketed_by_trl(theirs, log_q, ids, 0.0).sum().backward()
    scale = exact.grad.abs().max()
    assert ((mine.grad - exact.grad).abs().max() / scale).item() < 1e-5
    assert ((theirs.grad - exact.grad).abs().max() / scale).item() > 0.05


def test_trls_loss_jumps_at_the_ends_of_beta_and_our_normalised_jsd_does_not(make_logits):
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    student, teacher = make_logits(1, N, V, seed=5).float(), make_logits(1, N, V, seed=6).float()
    theirs = [trainer.generalized_jsd_loss(student, teacher, beta=beta).item() for beta in (0.9999, 1.0)]
    mine = [jsd(student, teacher, beta=beta, normalised=True).mean.item() for beta in (0.9999, 1.0)]
    assert theirs[1] / theirs[0] > 1000
    assert mine[1] / mine[0] == pytest.approx(1, rel=0.02)


def test_ligers_jsd_agrees_after_translating_its_beta(make_logits):
    chunked = pytest.importorskip("liger_kernel.chunked_loss")
    leaves = [[make_logits(*s, seed=i).float().requires_grad_() for i, s in enumerate([(N, 6), (V, 6)])] for _ in "ab"]
    teacher = make_logits(N, 4, seed=2).float(), make_logits(V, 4, seed=3).float()
    loss = chunked.LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)
    found = loss(*leaves[0], *teacher, torch.zeros(N, dtype=torch.int64))
    want = found[0] if isinstance(found, tuple) else found
    got = linear_divergence(*leaves[1], *teacher, kind="jsd", weight=0.5).mean
    assert_close(got, want, **SAME)
    assert want.item() < math.log(2)
    want.backward()
    got.backward()
    for mine, theirs in zip(leaves[1], leaves[0], strict=True):
        assert_close(mine.grad, theirs.grad, **SAME)
