"""Writes docs/estimators.md: what every estimator needs, what it expects, its bias and its variance, all computed here.

    make estimators        # python benchmarks/estimators.py docs/estimators.md

Everything is enumeration in float64, no sampling: with V tokens, the gradient of the estimator is taken for every
sampled token y and weighted with its probability. Bias is the distance of that expectation from the gradient of the
closed form, relative to the latter. Variance is the trace of the covariance of the per-token gradient, relative to the
policy gradient on k1 without a baseline. Positions are synthetic: a few tokens hold most of the mass and a long tail
holds the rest. Which baseline wins depends on how the gap between the models is distributed, here independently of the
probability; the biases of the truncated forms depend on the tail mass.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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

POSITIONS, VOCABULARY, SCALE, SEED = 8, 512, 4.0, 1
NOISE = {"near": 0.1, "mid": 0.5, "far": 1.5}
TEST_LINEAR = "test_linear.py::test_values_gradients_and_entropies_equal_the_materialised_form"
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
    """Student and teacher logits [N, V] and what a teacher would send for candidates."""

    student: Tensor
    teacher: Tensor

    @classmethod
    def make(cls, noise: float) -> "Problem":
        """Student = teacher + noise."""
        generator = torch.Generator().manual_seed(SEED)
        teacher = SCALE * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
        gap = torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
        return cls(teacher + noise * gap, teacher)

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
        ids = problem.student.topk(k).indices
        values, tail = problem.payload(ids)
        teacher = problem.teacher.log_softmax(-1)[rows, y]
        return head_tail_reverse_kl(leaf, y, ids[rows], values[rows], teacher, tail[rows], baseline=baseline).per_token

    return loss


def topk(k: int, kind: str, tail: str, support: str) -> Callable[[Problem, Tensor, Tensor, Tensor], Tensor]:
    def loss(problem: Problem, rows: Tensor, leaf: Tensor, y: Tensor) -> Tensor:
        ids = getattr(problem, support).topk(k).indices
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
        ids = problem.teacher.topk(k).indices[rows]
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


def moments(estimator: Estimator, problem: Problem) -> tuple[Tensor, float]:
    """Expected gradient [N, V] and the trace of its covariance, by enumeration of every token."""
    p = problem.student.softmax(-1)
    expected, second = torch.zeros_like(p), 0.0
    for position in range(POSITIONS):
        rows, y = torch.full((VOCABULARY,), position), torch.arange(VOCABULARY)
        leaf = problem.student[rows].requires_grad_()
        (gradient,) = torch.autograd.grad(estimator.loss(problem, rows, leaf, y).sum(), leaf)
        expected[position] = p[position] @ gradient
        second += float(p[position] @ gradient.square().sum(-1))
    return expected, max(second - float(expected.square().sum()), 0.0)


def figures(estimator: Estimator, problem: Problem, unit: float) -> tuple[float, float]:
    """Relative bias and relative variance."""
    leaf = problem.student.clone().requires_grad_()
    (truth,) = torch.autograd.grad(estimator.target(leaf, problem.teacher), leaf)
    expected, variance = moments(estimator, problem)
    return float((expected - truth).norm() / truth.norm()), variance / unit


def table() -> str:
    lines = [
        "# Estimators",
        "",
        "Written by `make estimators`; do not edit. p is the student, q the teacher, y ~ p the sampled token, sg stops",
        "the gradient. `forward_kl` is KL(q || p), `reverse_kl` is KL(p || q).",
        "",
        *(__doc__ or "").split("\n\n")[2].strip().splitlines(),
        "",
        f"{POSITIONS} positions, V = {VOCABULARY}, teacher logits {SCALE:g} N(0, 1), student = teacher + noise N(0, 1),"
        " noise " + ", ".join(f"{noise:g} ({name})" for name, noise in NOISE.items()) + f", seed {SEED}.",
        "",
        "| estimator | payload | differentiated | bias near / mid / far | variance near / mid / far | use | test |",
        "|---|---|---|---|---|---|---|",
    ]
    problems = {name: Problem.make(noise) for name, noise in NOISE.items()}
    base = next(e for e in ESTIMATORS if e.name.endswith("policy_gradient"))
    units = {name: moments(base, problem)[1] for name, problem in problems.items()}
    for estimator in ESTIMATORS:
        found = [figures(estimator, problem, units[name]) for name, problem in problems.items()]
        biases = " / ".join(percent(bias) for bias, _ in found)
        variances = " / ".join("0" if variance < 1e-12 else f"{variance:.3f}" for _, variance in found)
        test = estimator.test if estimator.test == "-" else f"`{estimator.test}`"
        cells = (estimator.name, estimator.payload, estimator.form, biases, variances, estimator.use, test)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *NOTES.strip().splitlines(), ""])


def percent(value: float) -> str:
    return "0" if value < 1e-9 else f"{100 * value:.0f} %" if value > 0.1 else f"{100 * value:.2g} %"


NOTES = """
Tests are in `tests/opd/maths/`. A bias of 0 means below 1e-9, which is rounding; the tests assert it for every K from 0
to V, for candidates chosen by the student, the teacher or a stale policy, and for G-OPD's adjusted targets.

## What is exact on which payload

- `hidden` and `full`: every divergence, every mixture weight, every temperature, G-OPD's normalised target.
- `gather` and `topk`: the expected gradient of the reverse KL, also towards a G-OPD target. Values of `head_tail` are
  unbiased too, up to the normaliser of a G-OPD target.
- `topk` for forward KL, JSD and the skewed KLs: a lower bound whose error vanishes with the tail mass.
- Stale rows: with `behaviour_log_probs` the gradient stays unbiased given the prefix; a cap on the weight leaves a bias
  where it bites. The distribution of prefixes is not corrected.

## What can be watched on which payload

| payload | overlap of the top k | mass on both sides, tails | entropies |
|---|---|---|---|
| hidden, full | yes | of the student's and the teacher's top k | both |
| topk | with the student's own candidates | of the teacher's top k | student |
| gather | no: the teacher's top k is not sent | of the student's top k | student |
| sampled | no | no | student |

`hidden` has it from `linear_divergence(topk=k)`, in the same tiles; `full` from `topk_figures`; the estimators report
the masses of their candidates among their diagnostics. `test_diagnostics.py` has the definitions.

## Conventions that differ elsewhere

- `jsd(beta)` mixes M = beta q + (1 - beta) p, as GKD and TRL do; other libraries give beta to the student. TRL returns
  the forward KL at beta 0 and the reverse KL at beta 1, where the JSD itself is zero: a jump of several orders of
  magnitude that ours refuses. `normalised=True` divides by beta (1 - beta) and is continuous.
- No divergence is multiplied by temperature squared.
- TRL's tail bucket clamps the head's mass at 1 - 1e-7, which loses the tail's gradient when the student is saturated.
  Ours is a logsumexp over the complement; the two agree where the tail holds more than 1e-4.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=None, help="where to write; standard output if left out")
    path = parser.parse_args().path
    torch.set_num_threads(1)
    text = table()
    if path is None:
        print(text)
    else:
        path.write_text(text)


if __name__ == "__main__":
    main()
