"""Writes docs/estimators.md: what every estimator needs, what it expects, its bias and its variance, all computed here.

    make estimators        # python benchmarks/estimators.py docs/estimators.md

Everything is enumeration in float64, no sampling: with V tokens, the gradient of the estimator is taken for every
sampled token y and weighted with its probability. Bias is the distance of that expectation from the gradient of the
closed form, relative to the latter. Variance is the trace of the covariance of the per-token gradient, relative to the
policy gradient on k1 without a baseline. Positions are synthetic: a few tokens hold most of the mass and a long tail
holds the rest. Which baseline wins depends on how the gap between the models is distributed, here independently of the
probability; the biases of the truncated forms depend on the tail mass.

These biases are those of a position, given its prefix. The column "bias of a batch" has what the mean over a batch adds
to them: a mean divides by lengths, and lengths depend on the tokens that were drawn, so that weights and estimates are
correlated. It is enumerated over all responses of a language of {V} tokens and at most {T} positions (K = 2 in place of
64, 1 in place of 8; noise "mid").
"""

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from support.estimator_forms import ESTIMATORS, Estimator, Problem
from support.sequences import LONGEST, Language, batch_bias
from support.sequences import VOCABULARY as LANGUAGE_VOCABULARY
from support.tokenizations import biases

POSITIONS, VOCABULARY, SCALE = 8, 512, 4.0
SEEDS = range(1, 8)
NOISE = {"near": 0.1, "mid": 0.5, "far": 1.5}
#: Label -> aggregation of a batch and its rows.
BATCHES = {
    "constant": ("constant", 1),
    "sequence_mean": ("sequence_mean", 1),
    "token_mean of 4 rows": ("token_mean", 4),
    "of 64 rows": ("token_mean", 64),
}


def make_problem(noise: float, seed: int) -> Problem:
    """Student = teacher + noise."""
    generator = torch.Generator().manual_seed(seed)
    teacher = SCALE * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
    gap = torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)
    return Problem(teacher + noise * gap, teacher)


def moments(estimator: Estimator, problem: Problem) -> tuple[Tensor, float]:
    """Expected gradient [N, V] and the trace of its covariance, by enumeration of every token."""
    p = problem.student.softmax(-1)
    if not estimator.samples:
        # Asked with an id that no vocabulary has: a form that looked at its token would fail. The one gradient is all.
        leaf, rows = problem.student.clone().requires_grad_(), torch.arange(POSITIONS)
        loss = estimator.loss(problem, rows, leaf, torch.full((POSITIONS,), VOCABULARY))
        return torch.autograd.grad(loss.sum(), leaf)[0], 0.0
    expected, second = torch.zeros_like(p), 0.0
    for position in range(POSITIONS):
        rows, y = torch.full((VOCABULARY,), position), torch.arange(VOCABULARY)
        leaf = problem.student[rows].requires_grad_()
        (gradient,) = torch.autograd.grad(estimator.loss(problem, rows, leaf, y).sum(), leaf)
        expected[position] = p[position] @ gradient
        second += float(p[position] @ gradient.square().sum(-1))
    return expected, max(second - float(expected.square().sum()), 0.0)


def bias_and_variance(estimator: Estimator, problem: Problem) -> tuple[float, float]:
    """Relative bias, and variance."""
    leaf = problem.student.clone().requires_grad_()
    (truth,) = torch.autograd.grad(estimator.target(leaf, problem.teacher), leaf)
    expected, variance = moments(estimator, problem)
    return float((expected - truth).norm() / truth.norm()), variance


def figures(noise: float) -> dict[str, tuple[list[float], list[float]]]:
    """Biases and variances of every estimator, one for each seed."""
    base = next(e.name for e in ESTIMATORS if e.name.endswith("policy_gradient"))
    found: dict[str, tuple[list[float], list[float]]] = {e.name: ([], []) for e in ESTIMATORS}
    for seed in SEEDS:
        problem = make_problem(noise, seed)
        of_seed = {estimator.name: bias_and_variance(estimator, problem) for estimator in ESTIMATORS}
        for name, (bias, variance) in of_seed.items():
            found[name][0].append(bias)
            found[name][1].append(variance / of_seed[base][1])
    return found


@cache
def _languages() -> list[Language]:
    return [Language.make(NOISE["mid"], seed) for seed in SEEDS]


def batch_biases(estimator: Estimator) -> list[float]:
    """The median over the seeds for each of `BATCHES`."""
    languages = _languages()
    return [median(batch_bias(estimator, one, mode, rows) for one in languages) for mode, rows in BATCHES.values()]


def table() -> str:
    columns = ("estimator", "payload", "differentiated", "bias near / mid / far", "variance near / mid / far")
    columns += ("bias of a batch: " + " / ".join(BATCHES), "use", "test")
    lines = [
        "# Estimators",
        "",
        "Written by `make estimators`; do not edit. p is the student, q the teacher, y ~ p the sampled token, sg stops",
        "the gradient. `forward_kl` is KL(q || p), `reverse_kl` is KL(p || q).",
        "",
        *explanation().splitlines(),
        "",
        f"{POSITIONS} positions, V = {VOCABULARY}, teacher logits {SCALE:g} N(0, 1), student = teacher + noise N(0, 1),"
        " noise " + ", ".join(f"{noise:g} ({name})" for name, noise in NOISE.items()) + ".",
        f"Each figure is the median over {len(SEEDS)} seeds; variances with the lowest and the highest.",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    found = [figures(noise) for noise in NOISE.values()]
    for estimator in ESTIMATORS:
        pairs = [of_noise[estimator.name] for of_noise in found]
        biases = " / ".join(percent(median(bias)) for bias, _ in pairs)
        variances = " / ".join(spread(variance) for _, variance in pairs)
        batch = " / ".join(percent(bias) for bias in batch_biases(estimator))
        test = estimator.test if estimator.test == "-" else f"`{estimator.test}`"
        cells = (estimator.name, estimator.payload, estimator.form, biases, variances, batch, estimator.use, test)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *NOTES.strip().splitlines(), "", *canonical().splitlines()]) + "\n"


def canonical() -> str:
    """The section on teachers with another tokenizer."""
    lines = [
        CANONICAL.strip(),
        "",
        "| logit lowered by | gap, nats per letter | bias of the gradient |",
        "|---|---|---|",
    ]
    for trained in (0, 2, 4, 8):
        gaps, gradients = zip(*(biases(trained, seed) for seed in SEEDS), strict=True)
        lines.append(f"| {trained} | {median(gaps):.4f} | {percent(median(gradients))} |")
    return "\n".join(lines)


def explanation() -> str:
    """The paragraphs of this module that say how the figures are made."""
    text = "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip()
    return text.replace("{V}", str(LANGUAGE_VOCABULARY)).replace("{T}", str(LONGEST))


def percent(value: float) -> str:
    return "0" if value < 1e-9 else f"{100 * value:.0f} %" if value > 0.1 else f"{100 * value:.2g} %"


def spread(values: Sequence[float]) -> str:
    """Median, lowest and highest."""
    if max(values) < 1e-12:
        return "0"
    if max(values) - min(values) < 5e-4:
        return f"{median(values):.3f}"
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


NOTES = """
Tests are in `tests/opd/maths/`. A bias of 0 means below 1e-9, which is rounding; the tests assert it for every K from 0
to V, for candidates chosen by the student, the teacher or a stale policy, and for G-OPD's adjusted targets.

## When "unbiased" holds

- Given its prefix, a position's gradient is unbiased as the table says. In a batch it stays so with aggregation
  `constant`, which divides by a number that no response changes: exactly unbiased for the sum over a response of the
  divergences at its prefixes.
- `sequence_mean` divides a response by its own length, which depends on the sampled tokens: estimators that look at the
  sampled token are biased, and more rows do not help. `gather` suffers less than `sampled`, as far as its head covers.
- `token_mean` divides by the tokens of all rows: the bias falls with the number of rows, about as one over it.
- Payload `hidden`, and every form that does not look at the sampled token, adds nothing under any aggregation.
- All of this is with prefixes held fixed. That a token changes what follows is left out unless `discount` brings it in.

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


CANONICAL = """
## A teacher with another tokenizer

`span_opd` reads a teacher in its canonical tokens of the student's text. The log-prob of the text, the sum over all of
its tokenizations, is larger by a gap. Enumerated over all texts of four letters, a or b, for a teacher with the tokens
a, b and ab, which gives the token b after a, never canonical, a logit that is lower by so much; median over the seeds.
The estimate of the KL to the canonical tokens is itself unbiased
(`test_spans.py::test_the_expected_gradient_is_that_of_the_divergence_between_texts`).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=None, help="file to write; standard output by default")
    path = parser.parse_args().path
    torch.set_num_threads(1)
    text = table()
    if path is None:
        print(text)
    else:
        path.write_text(text)


if __name__ == "__main__":
    main()
