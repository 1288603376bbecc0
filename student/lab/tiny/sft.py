"""Supervised fine-tuning on worked solutions, with corrupted prefixes so that the model can judge other models' errors.

A model that saw only correct scratch work is a poor teacher: on a student's wrong prefix its probabilities are noise.
So in half of the rows random digits replace some of the answer's input tokens while the labels stay right, which
teaches the model what is true whatever stands before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.errors import DataError
from opd.tasks import Prompt, PromptSource
from student.lab.tiny.generate import accuracy
from student.lab.tiny.plans import SftPlan, StepProgress

IGNORED = -100
_CHECK_PROMPTS = 10**9
"""Position in the training stream of the prompts that `SftPlan.until` is checked on."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Encoded rows: prompt, worked solution, end token, right-padded.

    Attributes:
        ids: [B, S] int64.
        answer: [B, S] bool, true at the tokens of the solution and at the end token.
    """

    ids: Int[Tensor, "B S"]
    answer: Bool[Tensor, "B S"]


def encode_rows(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast) -> Rows:
    """Encode prompts with their worked solutions.

    Raises:
        DataError: when a prompt carries no solution.
    """
    for prompt in prompts:
        if "solution" not in prompt.extra or prompt.text is None:
            raise DataError(f"prompt {prompt.uid} has no worked solution to train on; use one of opd's own text tasks.")
    texts = [[str(prompt.text) for prompt in prompts], [str(prompt.extra["solution"]) for prompt in prompts]]
    heads, tails = (tokenizer(part)["input_ids"] for part in texts)
    length = max(len(head) + len(tail) + 1 for head, tail in zip(heads, tails, strict=True))
    ids = torch.full((len(prompts), length), tokenizer.pad_token_id)
    answer = torch.zeros((len(prompts), length), dtype=torch.bool)
    for row, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        end = len(head) + len(tail) + 1
        ids[row, :end] = torch.tensor([*head, *tail, tokenizer.eos_token_id])
        answer[row, len(head) : end] = True
    return Rows(ids, answer)


def corrupt(rows: Rows, noise: float, digits: Int[Tensor, " D"], generator: torch.Generator) -> Int[Tensor, "B S"]:
    """Input ids in which random digits replace answer tokens with chance `noise`, in a random half of the rows."""
    chosen = torch.rand(rows.ids.shape, generator=generator) < noise
    chosen &= torch.rand((len(rows.ids), 1), generator=generator) < 0.5
    drawn = digits[torch.randint(len(digits), rows.ids.shape, generator=generator)]
    return torch.where(chosen & rows.answer, drawn, rows.ids)


def train_sft(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    source: PromptSource,
    plan: SftPlan,
    *,
    seed: int,
    max_new_tokens: int = 64,
    progress: StepProgress | None = None,
) -> float:
    """Train `model` in place on the source's training stream; returns the mean loss of the last tenth, nats per token.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        source: where rows come from.
        plan: how to train.
        seed: of the noise.
        max_new_tokens: enough for a correct answer, for the checks of `plan.until`.
        progress: called after each step.

    Raises:
        DataError: when the prompts carry no worked solutions.
    """
    digits = torch.tensor(tokenizer("0123456789")["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, plan))
    losses: list[float] = []
    model.train()
    for step in range(plan.steps):
        rows = encode_rows(source.prompts("train", plan.batch, plan.start + step * plan.batch), tokenizer)
        inputs = corrupt(rows, plan.noise, digits, generator) if plan.noise else rows.ids
        labels = torch.where(rows.answer, rows.ids, IGNORED)
        # Padding stands on the right, where causal attention never looks, so no mask is needed.
        logits = model(input_ids=inputs[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        reached = (
            plan.until is not None
            and step % 20 == 19
            and _level(model, tokenizer, source, max_new_tokens) >= plan.until
        )
        if progress is not None:
            progress(plan.steps if reached else step + 1, plan.steps)
        if reached:
            break
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _level(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, source: PromptSource, max_new_tokens: int
) -> float:
    """Greedy accuracy on prompts of the training stream that no stage reaches, so that held-out ones stay unseen."""
    model.eval()
    level = accuracy(model, tokenizer, source, 128, max_new_tokens=max_new_tokens, split="train", start=_CHECK_PROMPTS)
    model.train()
    return level


def _rate(step: int, plan: SftPlan) -> float:
    """Share of the peak learning rate: linear up, then linear down to a tenth."""
    if step < plan.warmup:
        return (step + 1) / plan.warmup
    return 1.0 - 0.9 * (step - plan.warmup) / max(1, plan.steps - plan.warmup)
