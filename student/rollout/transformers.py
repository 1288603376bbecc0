"""Sample responses with a transformers model and a KV cache: left-padded prompts, a random stream per row.

A row leaves as soon as it has finished, through a callback, so that it can be scored while others still run. When
half of a batch has finished, the cache is cut down to the rows that go on.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from student.data.plan import PlannedRow
from student.data.row import Row
from student.rollout.expert import expert_rows
from student.rollout.requests import Request
from student.rollout.sampling import draw, most_likely
from student.rollout.spec import RolloutSpec

__all__ = ["RolloutSpec", "rollout"]


def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    planned: Sequence[PlannedRow],
    spec: RolloutSpec,
    *,
    policy_version: int = 0,
    purpose: tuple[object, ...] = ("rollout",),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Sample one response for each planned row that does not bring its answer.

    Args:
        model: causal LM in the state to sample from; put into eval mode for the duration.
        tokenizer: its tokenizer.
        planned: what to sample.
        spec: shared settings; the stop token that ends a response is kept as its last token.
        policy_version: steps that the weights have seen, recorded per token.
        purpose: first names of the random streams; evaluations use others than training.
        on_row: called with each row as soon as it is finished, in order of finishing.

    Returns:
        The rows in the order of `planned`.
    """
    was_training = model.training
    model.eval()
    rows: dict[int, Row] = {}
    try:
        requests = [Request(p, tokenizer, spec, purpose) for p in planned]
        given = [i for i, p in enumerate(planned) if p.answer is not None]
        if given:
            prompts = [requests[i].prompt_ids for i in given]
            answered = expert_rows(model, tokenizer, [planned[i] for i in given], prompts, spec, policy_version)
            for i, row in zip(given, answered, strict=True):
                rows[i] = row
                on_row(row)
        # Rows of similar prompt length share a batch; the order is a function of the plan, so it resumes.
        sampled = (i for i, p in enumerate(planned) if p.answer is None)
        order = sorted(sampled, key=lambda i: (len(requests[i].input_ids), i))
        for start in range(0, len(order), spec.batch_rows):
            indices = order[start : start + spec.batch_rows]

            def finish(position: int, indices: list[int] = indices) -> None:
                row = requests[indices[position]].row(tokenizer, policy_version)
                rows[indices[position]] = row
                on_row(row)

            _Decoder(model, [requests[i] for i in indices], spec).run(finish)
    finally:
        model.train(was_training)
    return [rows[i] for i in range(len(planned))]


class _Decoder:
    """Decodes a batch of rows token by token.

    Finished rows stay in the batch as ballast until they are half of it, because cutting a KV cache is a copy.
    """

    def __init__(self, model: PreTrainedModel, batch: Sequence[Request], spec: RolloutSpec) -> None:
        self.model, self.batch, self.spec = model, batch, spec
        self.uniforms = [request.uniforms() for request in batch]
        self.slots = list(range(len(batch)))
        self.running = set(self.slots)
        self.input_ids, self.mask = _left_pad([request.input_ids for request in batch], model.device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.temperature = torch.tensor([request.planned.temperature for request in batch], device=model.device)
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def run(self, finish: Callable[[int], None]) -> None:
        """Decode until every row has finished; calls finish(index in the batch)."""
        step = 0
        while self.running:
            logits = self.model(
                input_ids=self.input_ids,
                attention_mask=self.mask,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            ids = self._sample(logits, step, finish)
            step += 1
            self._extend(ids)

    def _sample(self, logits: Tensor, step: int, finish: Callable[[int], None]) -> Tensor:
        device, vocab = logits.device, self.spec.valid_vocab
        drawn = [self.uniforms[i][step] if i in self.running else 0.5 for i in self.slots]
        ids, logp = _draw_mixed(
            logits, torch.tensor(drawn, dtype=torch.float64, device=device), self.temperature, vocab
        )
        top = None
        if self.spec.candidates:
            found = most_likely(logits[:, :vocab], self.spec.candidates, self.spec.keep_ids)
            top = found.cpu().numpy().astype(np.uint32)
        for slot, (token, log_prob) in enumerate(zip(ids.tolist(), logp.tolist(), strict=True)):
            index = self.slots[slot]
            if index not in self.running:
                continue
            if self.batch[index].take(token, log_prob, None if top is None else top[slot]):
                self.running.discard(index)
                finish(index)
        return ids

    def _extend(self, ids: Tensor) -> None:
        if 2 * len(self.running) <= len(self.slots) and self.running:
            keep = [slot for slot, index in enumerate(self.slots) if index in self.running]
            index = torch.tensor(keep, device=ids.device)
            self.cache.batch_select_indices(index)
            self.mask, self.positions = self.mask[index], self.positions[index]
            self.temperature, ids = self.temperature[index], ids[index]
            self.slots = [self.slots[slot] for slot in keep]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.slots), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1
        self.input_ids = ids.unsqueeze(-1)


def _draw_mixed(logits: Tensor, uniform: Tensor, temperature: Tensor, valid_vocab: int) -> tuple[Tensor, Tensor]:
    """`draw` for rows that may have different temperatures."""
    levels = temperature.unique().tolist()
    if len(levels) == 1:
        return draw(logits, uniform, levels[0], valid_vocab)
    ids = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    logp = torch.zeros(len(logits), device=logits.device)
    for level in levels:
        chosen = temperature == level
        ids[chosen], logp[chosen] = draw(logits[chosen], uniform[chosen], level, valid_vocab)
    return ids, logp


def _left_pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
