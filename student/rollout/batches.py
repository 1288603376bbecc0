"""Decode batches of left-padded rows: for models whose keys and values `student.rollout.slots` cannot lay out itself.

A row leaves as soon as it has finished, through a callback, so that it can be scored while others still run. Finished
rows stay in the batch until they are half of it, because shrinking a KV cache copies it; then they are cut out.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from student.rollout.requests import Request
from student.rollout.sampling import draw_mixed, most_likely
from student.rollout.spec import RolloutSpec


class BatchDecoder:
    """Decodes a batch of rows token by token.

    Args:
        model: causal LM in eval mode.
        batch: what to decode together.
        spec: shared settings.
    """

    def __init__(self, model: PreTrainedModel, batch: Sequence[Request], spec: RolloutSpec) -> None:
        self.model, self.batch, self.spec = model, batch, spec
        self.uniforms = [request.uniforms() for request in batch]
        self.slots = list(range(len(batch)))
        self.running = set(self.slots)
        self.input_ids, self.mask = _left_pad([request.input_ids for request in batch], model.device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
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
        # All rows of a batch begin together, so the batch's step is the index of a row's token. 0.5: drawn for a row
        # that has finished, and not kept.
        drawn = [self.uniforms[i][step] if i in self.running else 0.5 for i in self.slots]
        levels = [self.batch[i].planned.temperature for i in self.slots]
        ids, logp = draw_mixed(logits, torch.tensor(drawn, dtype=torch.float64, device=device), levels, vocab)
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
            ids = ids[index]
            self.slots = [self.slots[slot] for slot in keep]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.slots), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1
        self.input_ids = ids.unsqueeze(-1)


def _left_pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
