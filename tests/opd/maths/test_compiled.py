"""Under torch.compile, in a process of its own: the run-time type checker of the other tests cannot be traced."""

import sys

import forked
import pytest

SCRIPT = """
import torch
from opd.maths import jsd, linear_divergence, reverse_kl, score_tokens

torch.manual_seed(0)
hidden, head = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
teacher = torch.randn(6, 4), torch.randn(20, 4)
ids = torch.randn(6, 20).topk(3).indices


def scored(h, w):
    scores = score_tokens(h @ w.T, candidate_ids=ids)
    return scores.candidates.sum() + scores.log_tail.sum()


losses = {
    "scores": scored,
    "exact": lambda h, w: reverse_kl(h @ w.T, teacher[0] @ teacher[1].T).mean,
    "mixed": lambda h, w: jsd(h @ w.T, teacher[0] @ teacher[1].T, temperature=0.7).mean,
    "figures": lambda h, w: linear_divergence(h, w, *teacher, kind="jsd", weight=0.3, topk=4, recompute=True).mean,
    "fused": lambda h, w: linear_divergence(2.0 * h, w, *teacher).mean,
}
for name, loss in losses.items():
    want = torch.autograd.grad(loss(hidden, head), [hidden, head])
    have = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(hidden, head), [hidden, head])
    for one, other in zip(have, want, strict=True):
        torch.testing.assert_close(one, other)
    print(name)
"""


@pytest.mark.slow
def test_divergences_compile_as_a_single_graph_with_the_same_gradients():
    done = forked.run([sys.executable, "-W", "ignore", "-c", SCRIPT])
    assert done.stdout.split() == ["scores", "exact", "mixed", "figures", "fused"], done.stderr[-3000:]
