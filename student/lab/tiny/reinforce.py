"""Reinforcement learning of the lab's domain teachers: leave-one-out policy gradient on the verifier's score.

One on-policy gradient step per batch of rollouts, so no importance ratio and no clipping are needed:

    gradient = E[ A_i * sum_t grad log pi(y_t) ] / (tokens per answer),   A_i = r_i - mean of the group's other r

unbiased up to the division by the mean answer length. Source: RLOO, arXiv 2402.14740. Training runs have their own
plug-ins; this one only makes models that are better than their parent in the way reinforcement learning makes them so.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tasks import PromptSource, Verdict
from student.lab.tiny.generate import Batch, sample, verdicts
from student.lab.tiny.plans import ReinforcePlan, StepProgress


def leave_one_out(found: list[Verdict], samples: int) -> Float[Tensor, " B"]:
    """Advantages of groups of `samples` consecutive rows: own score minus the mean score of the others.

    An unknown verdict gets advantage 0 and does not enter the mean of the others.
    """
    scores = torch.tensor([verdict.value for verdict in found]).view(-1, samples)
    known = torch.tensor([float(verdict.known) for verdict in found]).view(-1, samples)
    others = (known.sum(1, keepdim=True) - known).clamp(min=1)
    baseline = ((scores * known).sum(1, keepdim=True) - scores * known) / others
    return ((scores - baseline) * known).flatten()


def train_reinforce(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    source: PromptSource,
    plan: ReinforcePlan,
    *,
    seed: int,
    progress: StepProgress | None = None,
) -> float:
    """Train `model` in place on its own answers; returns the mean score of the last tenth of the steps, in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.0)
    scores: list[float] = []
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, (step + 1) / plan.warmup)
        prompts = source.prompts("train", plan.prompts, plan.start + step * plan.prompts)
        rows = [prompt for prompt in prompts for _ in range(plan.samples)]
        batch = sample(model, tokenizer, rows, max_new_tokens=plan.max_new_tokens, generator=generator)
        found = verdicts(batch, rows, source, tokenizer)
        advantages = leave_one_out(found, plan.samples)
        scores.append(sum(verdict.value for verdict in found) / len(found))
        if advantages.any():
            _step(model, optimizer, batch, advantages)
        if progress is not None:
            progress(step + 1, plan.steps)
    last = scores[-max(1, len(scores) // 10) :]
    return sum(last) / len(last)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, advantages: Float[Tensor, " B"]
) -> None:
    """One ascent step on the advantage-weighted log-likelihood."""
    model.train()
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, position_ids=positions).logits
    answers = batch.ids[:, batch.prompt_length :]
    log_probs = logits[:, batch.prompt_length - 1 : -1].log_softmax(-1)
    taken = log_probs.gather(-1, answers[..., None])[..., 0]
    mask = batch.mask[:, batch.prompt_length :]
    loss = -(taken * mask * advantages[:, None]).sum() / mask.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
