"""Evaluation: sample held-out prompts, verify the answers, measure reverse KL against the teacher."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from student.controllers import EvalReport
from student.data.batch import collate, split
from student.data.plan import plan_step
from student.data.row import Row
from student.learning.learner import Learner
from student.learning.terms import Term, losses_of
from student.rollout.transformers import RolloutSpec, rollout
from student.scoring.needs import Needs


def sample_answers(
    learner: Learner,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    spec: RolloutSpec,
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int,
    names: Sequence[object],
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Sample `samples` answers per prompt from the current weights, in the random streams named by `names`."""
    plan = plan_step(0, prompts, samples=samples, max_new_tokens=max_new_tokens, temperature=temperature)
    return rollout(
        learner.student.lm,
        tokenizer,
        plan.rows,
        spec,
        purpose=("eval", *names),
        on_row=on_row,
    )


def report(rows: Sequence[Row], source: PromptSource, samples: int, reverse_kl: float | None) -> EvalReport:
    """Verify rows (grouped by prompt, `samples` each) and sum up."""
    for row in rows:
        row.verdict = source.verify(row.prompt, row.text)
    per_prompt: list[float | None] = []
    domains: dict[str, list[float]] = {}
    for start in range(0, len(rows), samples):
        known = [row.verdict.value for row in rows[start : start + samples] if row.verdict and row.verdict.known]
        per_prompt.append(sum(known) / len(known) if known else None)
        domain = rows[start].prompt.domain
        if known and domain is not None:
            domains.setdefault(domain, []).append(sum(known) / len(known))
    judged = [value for value in per_prompt if value is not None]
    tokens = sum(row.length for row in rows)
    return EvalReport(
        accuracy=sum(judged) / len(judged) if judged else float("nan"),
        per_prompt=tuple(per_prompt),
        mean_length=tokens / max(1, len(rows)),
        truncated=sum(row.truncated for row in rows) / max(1, len(rows)),
        reverse_kl=reverse_kl,
        tokens=tokens,
        by_domain={name: (sum(found) / len(found), len(found)) for name, found in sorted(domains.items())},
    )


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
