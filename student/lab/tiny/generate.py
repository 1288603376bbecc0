"""Sampling from a tiny model with a key-value cache, and its accuracy on a task.

This is the builder's own small sampler; training runs use the student's rollouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from opd.tasks import Prompt, PromptSource, Split, Verdict, encode_prompt


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts and answers of one call.

    Attributes:
        ids: [B, P + T] int64, prompts left-padded to P, answers right-padded to T with the padding id.
        mask: [B, P + T] int64, 1 at real tokens, the end token included.
        prompt_length: P.
    """

    ids: Int[Tensor, "B S"]
    mask: Int[Tensor, "B S"]
    prompt_length: int


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Batch:
    """Continue each prompt until its end token or `max_new_tokens`; temperature 0 is greedy."""
    encoded = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    width = max(map(len, encoded))
    pad = int(tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    done = torch.zeros(len(encoded), dtype=torch.bool)
    cache, fresh = None, ids
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        out = model(
            input_ids=fresh,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        fresh = torch.where(done[:, None], pad, chosen)
        ids = torch.cat([ids, fresh], 1)
        mask = torch.cat([mask, (~done[:, None]).long()], 1)
        done |= fresh[:, 0] == tokenizer.eos_token_id
        if bool(done.all()):
            break
    return Batch(ids, mask, width)


def verdicts(
    batch: Batch, prompts: Sequence[Prompt], source: PromptSource, tokenizer: PreTrainedTokenizerFast
) -> list[Verdict]:
    """Judge the answers of a batch."""
    texts = tokenizer.batch_decode(batch.ids[:, batch.prompt_length :], skip_special_tokens=True)
    return [source.verify(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    source: PromptSource,
    count: int,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    split: Split = "heldout",
    start: int = 0,
) -> float:
    """Share of `count` prompts of a split that the model answers correctly; unknown verdicts do not count."""
    generator = torch.Generator().manual_seed(seed)
    prompts = source.prompts(split, count, start)
    found = []
    for first in range(0, count, 256):
        part = prompts[first : first + 256]
        batch = sample(
            model, tokenizer, part, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator
        )
        found += [verdict for verdict in verdicts(batch, part, source, tokenizer) if verdict.known]
    return sum(verdict.status == "correct" for verdict in found) / max(1, len(found))
