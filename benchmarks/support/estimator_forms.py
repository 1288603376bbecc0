"""The estimators of docs/estimators.md as losses per token, with what each is meant for and the test that backs it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opd.maths import (
    forward_kl,
    head_tail_reverse_kl,
    jsd,
    reverse_kl,
    sampled_reverse_kl,
    topk_divergence,
)

TEST_LINEAR = "linear/test_divergence.py::test_values_gradients_and_entropies_equal_the_materialised_form"
TEST_HEAD_TAIL = "test_head_tail.py::test_head_tail_gradient_is_unbiased_for_every_k"
TEST_SAMPLED = "test_sampled.py::test_policy_gradient_and_k2_have_the_gradient_of_the_reverse_kl"
TEST_VARIATE = "test_sampled.py::test_a_control_variate_leaves_the_expectation_and_lowers_the_variance"
TEST_K1 = "test_sampled.py::test_k1_backpropagated_has_zero_expected_gradient"
TEST_K3 = "test_sampled.py::test_k3_backpropagated_has_the_gradient_of_the_forward_kl"
TEST_BUCKET = "test_topk.py::test_buckets_obey_the_data_processing_inequality_in_k"
TEST_TOPK = "test_topk.py::test_value_and_gradient_agree_with_autograd_of_the_definition"
TEST_EXACT = "test_exact.py::test_value_and_gradient_agree_with_the_textbook"


@dataclass(frozen=True)
class Problem:
    """Student and teacher logits [N, V] and what a teacher would send for candidates.

    Attributes:
        student: [N, V].
        teacher: [N, V].
        supports: the K to use in place of an estimator's own, where the vocabulary is too small for it.
    """

    student: Tensor
    teacher: Tensor
    supports: Mapping[int, int] = field(default_factory=dict)

    def top(self, support: str, k: int) -> Tensor:
        """The k most likely ids of "student" or "teacher"."""
        logits: Tensor = getattr(self, support)
        return logits.topk(self.supports.get(k, k)).indices

    def payload(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The teacher's log-probs at the ids, and its log tail mass."""
        log_q = self.teacher.log_softmax(-1)
        return log_q.gather(1, ids), log_q.scatter(1, ids, -torch.inf).logsumexp(-1)


@dataclass(frozen=True)
class Estimator:
    """A row of the table.

    Attributes:
        name: how it is called.
        payload: what the teacher must send.
        form: what is differentiated.
        target: the divergence whose gradient it is meant to have.
        loss: (problem, rows, leaf [n, V], y [n]) -> per-token loss; rows [n] are indices of positions.
        use: when to use it.
        test: the test that backs the row.
    """

    name: str
    payload: str
    form: str
    target: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Problem, Tensor, Tensor, Tensor], Tensor]
    use: str
    test: str

    @property
    def samples(self) -> bool:
        """Whether the loss looks at the sampled token."""
        return self.name.startswith(("`head_tail_reverse_kl`", "`sampled_reverse_kl`"))


def reverse(student: Tensor, teacher: Tensor) -> Tensor:
    return reverse_kl(student, teacher).total


def forward(student: Tensor, teacher: Tensor) -> Tensor:
    return forward_kl(student, teacher).total


def half_jsd(student: Tensor, teacher: Tensor) -> Tensor:
    return jsd(student, teacher, beta=0.5).total


def sampled(form: str, *, baseline: bool = False) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    def loss(problem: Problem, rows: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        teacher = problem.teacher.log_softmax(-1)[rows, y]
        variate = reverse_kl(problem.student, problem.teacher).per_token[rows] if baseline else None
        return sampled_reverse_kl(leaf, y, teacher, form=form, control_variate=variate, acknowledge_bias=True).per_token

    return loss


def head_tail(k: int, baseline: str) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    def loss(problem: Problem, rows: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        ids = problem.top("student", k)
        values, tail = problem.payload(ids)
        teacher = problem.teacher.log_softmax(-1)[rows, y]
        return head_tail_reverse_kl(leaf, y, ids[rows], values[rows], teacher, tail[rows], baseline=baseline).per_token

    return loss


def topk(k: int, kind: str, tail: str, support: str) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    def loss(problem: Problem, rows: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        ids = problem.top(support, k)
        values, log_tail = problem.payload(ids)
        weight = 0.5 if kind == "jsd" else None
        return topk_divergence(
            leaf, ids[rows], values[rows], log_tail[rows], kind=kind, tail=tail, weight=weight
        ).per_token

    return loss


def exact(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    kinds = {reverse: reverse_kl, forward: forward_kl, half_jsd: jsd}
    return lambda problem, rows, leaf, y: kinds[function](leaf, problem.teacher[rows]).per_token


def truncated(k: int, kind: str, *, renormalise: bool) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    """What others differentiate, for comparison: the sum over the teacher's k entries, plain or renormalised."""

    def loss(problem: Problem, rows: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        ids = problem.top("teacher", k)[rows]
        log_p = leaf.log_softmax(-1).gather(1, ids)
        log_q = problem.teacher.log_softmax(-1)[rows].gather(1, ids)
        if renormalise:
            log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
        left, right = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
        return (left.exp() * (left - right)).sum(-1)

    return loss


ESTIMATORS = [
    Estimator(
        "`linear_divergence`, `reverse_kl`",
        "hidden, full",
        "closed form",
        reverse,
        exact(reverse),
        "whenever hidden states can be served",
        TEST_LINEAR,
    ),
    Estimator(
        "`head_tail_reverse_kl`, tail_mean, K=64",
        "gather, topk",
        "detached head + centred sampled tail",
        reverse,
        head_tail(64, "tail_mean"),
        "**the default** for gather and topk",
        TEST_HEAD_TAIL,
    ),
    Estimator(
        "`head_tail_reverse_kl`, tail_mean, K=8",
        "gather, topk",
        "the same",
        reverse,
        head_tail(8, "tail_mean"),
        "narrow links",
        TEST_HEAD_TAIL,
    ),
    Estimator(
        "`head_tail_reverse_kl`, head_kl, K=64",
        "gather, topk without tail",
        "detached head + sampled tail, head KL as baseline",
        reverse,
        head_tail(64, "head_kl"),
        "teachers that send no tail",
        TEST_HEAD_TAIL,
    ),
    Estimator(
        "`head_tail_reverse_kl`, none, K=64",
        "gather, topk without tail",
        "detached head + sampled tail",
        reverse,
        head_tail(64, "none"),
        "comparison",
        TEST_HEAD_TAIL,
    ),
    Estimator(
        "`sampled_reverse_kl`, policy_gradient",
        "sampled",
        "sg(log p - log q) log p",
        reverse,
        sampled("policy_gradient"),
        "stock engines; 4 bytes per token",
        TEST_SAMPLED,
    ),
    Estimator(
        "`sampled_reverse_kl`, control variate",
        "sampled + a KL",
        "sg(log p - log q - KL) log p",
        reverse,
        sampled("policy_gradient", baseline=True),
        "a KL is known anyway (vOPD)",
        TEST_VARIATE,
    ),
    Estimator(
        "`sampled_reverse_kl`, k2",
        "sampled",
        "(log p - log q)^2 / 2",
        reverse,
        sampled("k2"),
        "losses instead of advantages",
        TEST_SAMPLED,
    ),
    Estimator(
        "`sampled_reverse_kl`, k1_loss",
        "sampled",
        "log p - log q",
        reverse,
        sampled("k1_loss"),
        "never: trains nothing",
        TEST_K1,
    ),
    Estimator(
        "`sampled_reverse_kl`, k3_loss",
        "sampled",
        "q/p - 1 + log p - log q",
        reverse,
        sampled("k3_loss"),
        "never: the forward KL in disguise",
        TEST_K3,
    ),
    Estimator(
        "`topk_divergence`, reverse_kl, bucket, student's 64",
        "gather",
        "K+1 buckets",
        reverse,
        topk(64, "reverse_kl", "bucket", "student"),
        "stale rows without behaviour log-probs",
        TEST_BUCKET,
    ),
    Estimator(
        "`topk_divergence`, reverse_kl, generalised, student's 64",
        "gather",
        "sum p log(p/q) - p + q",
        reverse,
        topk(64, "reverse_kl", "generalised", "student"),
        "the same, without a tail",
        TEST_TOPK,
    ),
    Estimator(
        "`topk_divergence`, reverse_kl, bucket, teacher's 64",
        "topk",
        "K+1 buckets",
        reverse,
        topk(64, "reverse_kl", "bucket", "teacher"),
        "gather is not served",
        TEST_BUCKET,
    ),
    Estimator(
        "`forward_kl`", "hidden, full", "closed form", forward, exact(forward), "mass-covering targets", TEST_EXACT
    ),
    Estimator(
        "`topk_divergence`, forward_kl, bucket, K=64",
        "topk",
        "K+1 buckets",
        forward,
        topk(64, "forward_kl", "bucket", "teacher"),
        "**the default** of the forward KL",
        TEST_BUCKET,
    ),
    Estimator(
        "`topk_divergence`, forward_kl, bucket, K=8",
        "topk",
        "K+1 buckets",
        forward,
        topk(8, "forward_kl", "bucket", "teacher"),
        "narrow links",
        TEST_BUCKET,
    ),
    Estimator(
        "`topk_divergence`, forward_kl, generalised, K=64",
        "topk without tail",
        "sum q log(q/p) - q + p",
        forward,
        topk(64, "forward_kl", "generalised", "teacher"),
        "teachers that send no tail",
        TEST_TOPK,
    ),
    Estimator(
        "not offered: truncated forward KL, K=64",
        "topk",
        "sum over K",
        forward,
        truncated(64, "forward_kl", renormalise=False),
        "never: sharpens at the optimum",
        "-",
    ),
    Estimator(
        "not offered: renormalised forward KL, K=64",
        "topk",
        "softmax over K on both sides",
        forward,
        truncated(64, "forward_kl", renormalise=True),
        "never: blind to the tail",
        "-",
    ),
    Estimator(
        "`topk_divergence`, jsd 0.5, bucket, K=64",
        "topk",
        "K+1 buckets",
        half_jsd,
        topk(64, "jsd", "bucket", "teacher"),
        "bounded losses",
        TEST_BUCKET,
    ),
]
