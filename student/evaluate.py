"""Evaluation: sample held-out prompts, verify the answers, measure reverse KL against the teacher."""

from collections.abc import Callable, Sequence

import torch

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import VerdictStatus
from student.controllers import EvalReport
from student.data.batch import collate, split
from student.data.plan import plan_step
from student.data.row import Row
from student.figures import half_width, ks_up_to, pass_at_k, repetition
from student.learning.learner import Learner
from student.learning.terms import Term, losses_of
from student.methods.distil.opd import OnPolicyDistillation
from student.rollout.engine import Sampler
from student.scoring.needs import Needs


def sample_answers(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    names: Sequence[object],
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Sample `samples` answers per prompt from the current weights, in the random streams named by `names`."""
    plan = plan_step(0, prompts, samples=samples, max_new_tokens=max_new_tokens, temperature=temperature)
    return sampler.sample(plan.rows, purpose=("eval", *names), on_row=on_row)


def report(rows: Sequence[Row], samples: int, reverse_kl: float | None, estimator: str = "") -> EvalReport:
    """Sum up verified rows (grouped by prompt, `samples` each).

    Args:
        rows: the answers, all of a prompt together.
        samples: answers per prompt.
        reverse_kl: nats per token, or None when it was not measured.
        estimator: how it was measured.
    """
    per_prompt: list[float | None] = []
    domains: dict[str, list[float]] = {}
    right: list[tuple[int, int]] = []
    for start in range(0, len(rows), samples):
        found = [row.verdict for row in rows[start : start + samples] if row.verdict and row.verdict.known]
        per_prompt.append(sum(verdict.value for verdict in found) / len(found) if found else None)
        right.append((sum(verdict.status is VerdictStatus.CORRECT for verdict in found), len(found)))
        domain = rows[start].prompt.domain
        if found and domain is not None:
            domains.setdefault(domain, []).append(per_prompt[-1] or 0.0)
    judged = [value for value in per_prompt if value is not None]
    tokens = sum(row.length for row in rows)
    return EvalReport(
        accuracy=sum(judged) / len(judged) if judged else float("nan"),
        per_prompt=tuple(per_prompt),
        mean_length=tokens / max(1, len(rows)),
        truncated=sum(row.truncated for row in rows) / max(1, len(rows)),
        reverse_kl=reverse_kl,
        tokens=tokens,
        by_domain={name: (sum(means) / len(means), len(means)) for name, means in sorted(domains.items())},
        accuracy_half_width=half_width(judged),
        pass_at=_pass_at(right, samples),
        reverse_kl_estimator=estimator if reverse_kl is not None else "",
        repetition=sum(repetition(row.response_ids) for row in rows) / max(1, len(rows)),
    )


def _pass_at(right: Sequence[tuple[int, int]], samples: int) -> dict[int, tuple[float, float | None]]:
    """pass@k from (correct, judged) answers of each prompt, over prompts with at least k judged ones."""
    found = {}
    for k in ks_up_to(samples) if samples > 1 else []:
        values = [pass_at_k(correct, judged, k) for correct, judged in right if judged >= k]
        if values:
            found[k] = (sum(values) / len(values), half_width(values))
    return found


@torch.no_grad()
def mean_divergence(learner: Learner, rows: Sequence[Row], term: Term, needs: Needs) -> float:
    """Mean of the term's `reverse_kl` metric over scored rows, nats per token."""
    learner.student.eval()
    top = bottom = 0.0
    for part in split(rows, learner.settings.micro_batch_tokens, by_teacher=True):
        micro = collate(rows, part, learner.accelerator.device)
        numerator, denominator = losses_of(term, learner.token_batch(micro, needs=needs)).metrics["reverse_kl"]
        top, bottom = top + float(numerator), bottom + float(denominator)
    learner.student.train()
    return top / max(1.0, bottom)


def estimator_of(term: OnPolicyDistillation) -> str:
    """How a term measures reverse KL, for people: figures of different estimators differ by their noise."""
    if term.settings.payload == "hidden":
        return "exact"
    if term.settings.payload == "sampled":
        return "log-ratio of sampled tokens"
    return f"exact on the student's top {term.settings.k}, sampled tail"
