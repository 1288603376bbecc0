"""Decodes left-padded batches: for models whose cache `student.rollout.slots` cannot lay out itself.

A row leaves as soon as it has finished, through a callback, so that it can be scored while others still run. Finished
rows stay in the batch until they are half of it, because shrinking a KV cache copies it; then they are cut out.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from opd.errors import ConfigError, one_line
from opd.kv_cache import reading
from student.model.trial import STEPS, Crossing, crossings, rows_across
from student.rollout.draw import draw_mixed, most_likely
from student.rollout.requests import Request, RolloutSpec
from student.rollout.slots import head_of

_known: WeakKeyDictionary[PreTrainedModel, dict[Crossing, str]] = WeakKeyDictionary()
"""What is wrong with each model across each length that was tried."""


class BatchDecoder:
    """Decodes a batch of rows token by token.

    Args:
        model: causal LM in eval mode, which `check_batches` accepts.
        batch: the requests to decode together.
        spec: settings that every rollout of the run shares.
    """

    def __init__(self, model: PreTrainedModel, batch: Sequence[Request], spec: RolloutSpec) -> None:
        self.model, self.batch, self.spec = model, batch, spec
        self.uniforms = [request.uniforms() for request in batch]
        self.slots = list(range(len(batch)))
        self.running = set(self.slots)
        self.input_ids, self.mask = _left_pad([request.input_ids for request in batch], model.device)
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=model.config)
        self.head = head_of(model, spec.valid_vocab)

    @torch.no_grad()
    def run(self, finish: Callable[[int], None]) -> None:
        """Decode until every row has finished; calls finish(index in the batch)."""
        step = 0
        while self.running:
            states = _states(self.model, self.input_ids, self.mask, self.positions, self.cache)
            ids = self._sample(self.head.logits(states), step, finish)
            step += 1
            self._extend(ids)

    def _sample(self, logits: Tensor, step: int, finish: Callable[[int], None]) -> Tensor:
        device, vocab = logits.device, self.spec.valid_vocab
        # All rows of a batch start together, so the batch's step is the index of the token in each row. A finished row
        # gets 0.5; what it draws is discarded.
        drawn = [self.uniforms[i][step] if i in self.running else 0.5 for i in self.slots]
        levels = [self.batch[i].planned.temperature for i in self.slots]
        ids, logp = draw_mixed(logits, torch.tensor(drawn, dtype=torch.float64, device=device), levels, vocab)
        top = None
        if self.spec.candidates:
            found = most_likely(logits, self.spec.candidates, self.spec.keep_ids)
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
            index: Any = torch.tensor(keep, device=ids.device)
            # Works for every kind of layer; `batch_select_indices` leaves out recurrent states, or does not exist.
            self.cache.reorder_cache(index)
            self.mask, self.positions = self.mask[index], self.positions[index]
            ids = ids[index]
            self.slots = [self.slots[slot] for slot in keep]
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.slots), 1)], dim=1)
        self.positions = self.positions[:, -1:] + 1
        self.input_ids = ids.unsqueeze(-1)


def _states(model: PreTrainedModel, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """[B, H] final hidden states of the last column; the keys, values and states of all columns go into `cache`."""
    states: Tensor = model.base_model(
        input_ids=ids, attention_mask=mask, position_ids=positions, **reading(model.base_model, cache)
    ).last_hidden_state[:, -1]
    return states


def check_batches(model: PreTrainedModel, longest: int) -> None:
    """Check that decoding rows of up to `longest` tokens in batches gives the numbers of the model's forward passes.

    Raises:
        ConfigError: if it does not, for example because the model needs another cache or ignores the mask.
    """
    known = _known.setdefault(model, {})
    for crossing in crossings(model, longest):
        if crossing not in known:
            known[crossing] = _difference(model, crossing)
        if known[crossing]:
            beyond = "" if crossing == min(known) else f" in rows of more than {crossing.length} tokens"
            raise ConfigError(
                f"rollout engine transformers cannot decode a {type(model).__name__} token by token{beyond}: "
                f"{known[crossing]}; set rollout.engine to {{name: vllm}}, or train another student"
                + (", or lower rollout.max_new_tokens or rollout.max_prompt_tokens." if beyond else ".")
            )


@torch.no_grad()
def _difference(model: PreTrainedModel, crossing: Crossing) -> str:
    """How tokens of two rows in a batch, across a length, differ from forward passes of each row; "" if equal."""
    head = head_of(model, len(model.get_output_embeddings().weight))
    whole, read = rows_across(model, crossing)
    cache = DynamicCache(config=model.config)
    # In half precision wide enough for rounding and another choice of expert; a token without its context differs more.
    half = model.dtype != torch.float32 or torch.is_autocast_enabled(model.device.type)
    most = 0.3 if half else 0.01
    try:
        own = [model(ids[None], use_cache=False).logits[0].float() for ids in whole]
        prompts = [ids[:n].cpu().numpy() for ids, n in zip(whole, read, strict=True)]
        ids, mask = _left_pad(prompts, model.device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        _states(model, ids, mask, positions, cache)
        for step in range(STEPS):
            at = [n + step for n in read]
            last = torch.stack([ids[n : n + 1] for ids, n in zip(whole, at, strict=True)])
            mask, positions = torch.cat([mask, torch.ones_like(last)], dim=1), positions[:, -1:] + 1
            found = head.logits(_states(model, last, mask, positions, cache))
            for logits, wanted, n in zip(found, own, at, strict=True):
                if (logits - wanted[n]).abs().max() > most * wanted[n].abs().max():
                    return "its logits differ from those of one pass over the whole row"
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError) as error:
        return one_line(error, 200)
    return ""


def _left_pad(prompts: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(p) for p in prompts)
    ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros((len(prompts), width), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)
