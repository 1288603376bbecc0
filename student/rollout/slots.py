"""Decodes rows in slots: a slot whose row has finished is refilled at once, so that the batch stays full to the end.

    slot s    prompt | sampled ... | not yet          keys and values [slots, heads, capacity, head size] per layer
    forward   one token for every slot, at its own position, over the columns up to the longest live row

Rows are padded on the right to multiples of 16, prompts run separately and are copied in, and no matrix product has
fewer than five rows. On a CPU, a row's tokens and log-probs are therefore the same bits for any number of slots and any
order of the other rows, up to about 192 tokens; beyond that, a wider batch may change the last bits. Once no rows are
waiting, the live rows are moved together and empty slots are dropped. Samples of one prompt share its forward pass.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from opd.heads import OutputHead, scale_and_cap
from opd.kv_cache import reading
from opd.lengths import most_positions
from student.model.moe_routes import Recorder
from student.model.trial import STEPS, Crossing, crossings, rows_across
from student.model.turn import turn_of
from student.rollout.draw import draw_mixed, most_likely
from student.rollout.requests import LEAST_ROWS, Request, RolloutSpec

_STEP = 16
"""Widths are multiples of this, so that few shapes occur and a row's bits do not depend on the lengths of others."""
_PREFILL_TOKENS = 16_384
"""Bound on the tokens of one prefill, whose activations take memory besides the cache."""
_known: WeakKeyDictionary[PreTrainedModel, dict[Crossing, bool]] = WeakKeyDictionary()
"""Whether slots agree with each model across each length that was tried."""


def settled(tokens: int) -> int:
    """The width that `tokens` columns are padded to."""
    return -(-tokens // _STEP) * _STEP


class Place:
    """Where each slot writes and how far it reads; shared by all layers.

    Attributes:
        position: [S] int64, the column that each slot writes next.
        width: number of columns that the forward pass reads.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = torch.arange(slots, device=device)
        self.position = torch.zeros(slots, dtype=torch.long, device=device)
        self.width = _STEP

    def attention(self, dtype: torch.dtype | None) -> Tensor:
        """[S, 1, 1, width] mask of what each slot may read: bool or, with `dtype`, a term to add to the scores."""
        seen = torch.arange(self.width, device=self.position.device) <= self.position[:, None]
        if dtype is not None:
            seen = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
        return seen[:, None, None, :]


class SlotLayer(DynamicLayer):
    """Keys and values of all slots in one layer; a forward pass writes one token per slot, each at its own column.

    Args:
        place: where the slots write and read.
        like: a layer of the model's own cache that has been written to, for shapes and dtype.
        capacity: number of columns.
        dtype: dtype of keys and values if not that of `like`; under autocast, the rotation makes keys float32 again.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, place: Place, like: Any, capacity: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        keys, values = like.keys, like.values
        self.place = place
        self.dtype, self.device, self.is_initialized = dtype or keys.dtype, keys.device, True
        slots = len(place.slots)
        # Zeros instead of uninitialised memory: a masked column gets weight 0, and 0 times NaN is NaN.
        self.keys = keys.new_zeros(slots, keys.shape[1], capacity, keys.shape[3], dtype=self.dtype)
        self.values = values.new_zeros(slots, values.shape[1], capacity, values.shape[3], dtype=self.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token per slot and return the columns to read."""
        place = self.place
        self.keys[place.slots, :, place.position] = key_states[:, :, 0].to(self.dtype)
        self.values[place.slots, :, place.position] = value_states[:, :, 0].to(self.dtype)
        return self.keys[:, :, : place.width], self.values[:, :, : place.width]

    def put(self, slots: Tensor, prompt: Any, rows: Tensor) -> None:
        """Copy the rows `rows` of a layer of a prefilled cache into `slots`."""
        width = prompt.keys.shape[2]
        self.keys[slots, :, :width] = prompt.keys[rows].to(self.dtype)
        self.values[slots, :, :width] = prompt.values[rows].to(self.dtype)

    def move(self, old: Tensor, new: Tensor, count: int) -> None:
        """Move slots `old` to `new`, and drop all slots from `count` on."""
        width = self.place.width
        self.keys[new, :, :width] = self.keys[old, :, :width]
        self.values[new, :, :width] = self.values[old, :, :width]
        self.keys, self.values = self.keys[:count], self.values[:count]


class SlotDecoder:
    """Decodes rows in slots.

    Args:
        model: causal LM in eval mode, for which `takes_slots` is true.
        requests: what to decode, in the order in which they get slots.
        spec: settings that every rollout of the run shares.
    """

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], spec: RolloutSpec) -> None:
        self.model, self.requests, self.spec = model, requests, spec
        longest = max(request.longest for request in requests)
        count = max(LEAST_ROWS, min(spec.rows(longest), len(requests)))
        self.capacity = settled(longest)
        # Prompts are padded no further than to where the model's positions end or change.
        self.widest = turn_of(model) or most_positions(model.config) or self.capacity
        self.place = Place(count, model.device)
        self.cache: DynamicCache | None = None
        self.layers: list[SlotLayer] = []
        self.owner: list[int | None] = [None] * count
        self.last = torch.zeros(count, dtype=torch.long, device=model.device)
        self.length = [0] * count
        self.uniforms: dict[int, Any] = {}
        self.waiting = deque(range(len(requests)))
        self.quota = max(1, count // 8)  # free slots to wait for before prompts are read; see `_run`
        self.head = head_of(model, spec.valid_vocab)
        self.recorder = Recorder(model) if spec.moe_routes else None
        self._mask_dtype = model.dtype if model.config._attn_implementation == "eager" else None

    @torch.no_grad()
    def run(self, finish: Callable[[int], None]) -> None:
        """Decode until every row has finished; calls `finish` with the index in `requests` of each row that ends."""
        with self.recorder or nullcontext():
            self._run(finish)

    def _run(self, finish: Callable[[int], None]) -> None:
        while True:
            live = sum(owner is not None for owner in self.owner)
            free = len(self.owner) - live
            # Fill several slots at once, because no slot decodes while prompts are read.
            if self.waiting and (free >= self.quota or not live):
                self._fill(finish)
                continue
            if not live:
                return
            if not self.waiting and len(self.owner) > LEAST_ROWS and 4 * live <= 3 * len(self.owner):
                self._shrink(max(LEAST_ROWS, live))
            self._step(finish)

    def _fill(self, finish: Callable[[int], None]) -> None:
        """Give free slots to waiting rows; different prompts of one width share a forward pass."""
        free = [slot for slot, owner in enumerate(self.owner) if owner is None]
        taken = [self.waiting.popleft() for _ in free[: len(self.waiting)]]
        groups: dict[int, list[tuple[int, int]]] = {}
        for slot, index in zip(free, taken, strict=False):
            tokens = len(self.requests[index].input_ids)
            groups.setdefault(max(tokens, min(settled(tokens), self.widest)), []).append((slot, index))
        for width, pairs in groups.items():
            some = max(1, _PREFILL_TOKENS // width)
            for start in range(0, len(pairs), some):
                self._prefill(width, pairs[start : start + some], finish)

    def _prefill(self, width: int, pairs: Sequence[tuple[int, int]], finish: Callable[[int], None]) -> None:
        # Samples of one prompt share a row of the prefill.
        prompts: dict[bytes, int] = {}
        rows = [prompts.setdefault(self.requests[index].input_ids.tobytes(), len(prompts)) for _, index in pairs]
        ids = np.zeros((len(prompts), width), np.int64)
        for line, text in enumerate(prompts):
            read = np.frombuffer(text, np.uint32)
            ids[line, : len(read)] = read
        device = self.model.device
        cache = DynamicCache(config=self.model.config)
        # Padding on the right needs no mask, because no earlier position attends to it.
        states = self.model.base_model(torch.from_numpy(ids).to(device), **reading(self.model.base_model, cache))
        at = torch.tensor(rows, device=device)
        slots = torch.tensor([slot for slot, _ in pairs], device=device)
        if self.cache is None:
            self.layers = [SlotLayer(self.place, layer, self.capacity, self.spec.autocast) for layer in cache.layers]
            self.cache = _joined(self.model, self.layers)
        for layer, prompt in zip(self.layers, cache.layers, strict=True):
            layer.put(slots, prompt, at)
        lengths = [len(self.requests[index].input_ids) for _, index in pairs]
        if self.recorder is not None:
            passed = self.recorder.take(len(prompts))
            for row, (_, index), length in zip(rows, pairs, lengths, strict=True):
                self.requests[index].moe_routes.append(passed[row, :length])
        for (slot, index), length in zip(pairs, lengths, strict=True):
            self.owner[slot], self.length[slot] = index, length
            self.uniforms[index] = self.requests[index].uniforms()
        ends = torch.tensor(lengths, device=device) - 1
        hidden = states.last_hidden_state[at, ends]
        self.place.position[slots] = ends + 1
        self.last[slots] = self._sample(hidden, [slot for slot, _ in pairs], finish)

    def _step(self, finish: Callable[[int], None]) -> None:
        """Decode one token for every live slot."""
        place = self.place
        longest = max(length for length, owner in zip(self.length, self.owner, strict=True) if owner is not None)
        # Attention runs over padded widths, so that a row's bits do not depend on the lengths of the other rows.
        place.width = min(settled(longest + 1), self.capacity)
        states = self.model.base_model(
            input_ids=self.last[:, None],
            position_ids=place.position[:, None],
            attention_mask=place.attention(self._mask_dtype),
            **reading(self.model.base_model, self.cache),
        )
        if self.recorder is not None:
            passed = self.recorder.take(len(self.owner))
            for slot, owner in enumerate(self.owner):
                if owner is not None:
                    self.requests[owner].moe_routes.append(passed[slot])
        live = [owner is not None for owner in self.owner]
        self.length = [length + here for length, here in zip(self.length, live, strict=True)]
        # An empty slot keeps its position and overwrites its own column, so that it does not run past the capacity.
        place.position += torch.tensor(live, device=place.position.device)
        self.last = self._sample(states.last_hidden_state[:, 0], range(len(self.owner)), finish)

    def _sample(self, hidden: Float[Tensor, "n h"], slots: Sequence[int], finish: Callable[[int], None]) -> Tensor:
        """Draw a token for each of `slots`; what an empty slot draws is discarded."""
        count, vocab = len(slots), self.spec.valid_vocab
        # Products of fewer rows round differently, and a row must not depend on how many others are left.
        if count < LEAST_ROWS:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, LEAST_ROWS - count))
        logits = self.head.logits(hidden)[:count]
        owners = [self.owner[slot] for slot in slots]
        drawn = [0.5 if i is None else self.uniforms[i][len(self.requests[i].ids)] for i in owners]
        levels = [1.0 if i is None else self.requests[i].planned.temperature for i in owners]
        # Empty slots get a temperature that is in use: if there is only one, rows need not be grouped by it.
        used = next((level for i, level in zip(owners, levels, strict=True) if i is not None), 1.0)
        levels = [used if i is None else level for i, level in zip(owners, levels, strict=True)]
        ids, logp = draw_mixed(
            logits,
            torch.tensor(drawn, dtype=torch.float64, device=logits.device),
            levels,
            vocab,
        )
        top = None
        if self.spec.candidates:
            likely = most_likely(logits, self.spec.candidates, self.spec.keep_ids)
            top = likely.cpu().numpy().astype(np.uint32)
        for line, (token, log_prob) in enumerate(zip(ids.tolist(), logp.tolist(), strict=True)):
            index, slot = owners[line], slots[line]
            if index is not None and self.requests[index].take(token, log_prob, None if top is None else top[line]):
                self.owner[slot] = None
                del self.uniforms[index]
                finish(index)
        return ids

    def _shrink(self, count: int) -> None:
        """Move live rows into the first `count` slots and drop the others."""
        live = [slot for slot, owner in enumerate(self.owner) if owner is not None]
        low = [slot for slot in range(count) if self.owner[slot] is None]
        # At most as many live slots lie beyond `count` as are free below it, so sources and targets never overlap.
        moves = list(zip([slot for slot in live if slot >= count], low, strict=False))
        device, place = self.model.device, self.place
        old, new = (torch.tensor([pair[side] for pair in moves], dtype=torch.long, device=device) for side in (0, 1))
        for layer in self.layers:
            layer.move(old, new, count)
        place.position[new], self.last[new] = place.position[old], self.last[old]
        place.position, place.slots, self.last = place.position[:count], place.slots[:count], self.last[:count]
        for source, target in moves:
            self.owner[target], self.length[target] = self.owner[source], self.length[source]
        self.owner, self.length = self.owner[:count], self.length[:count]


def _joined(model: PreTrainedModel, layers: Sequence[SlotLayer]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = list(layers)
    return cache


def head_of(model: PreTrainedModel, valid_vocab: int) -> OutputHead:
    """The model's output head, restricted to the ids that can be drawn."""
    output: Any = model.get_output_embeddings()
    scale, cap = scale_and_cap(model.config.get_text_config())
    return OutputHead(output.weight, getattr(output, "bias", None), scale, cap, len(output.weight) - valid_vocab)


def takes_slots(model: PreTrainedModel, longest: int) -> bool:
    """Whether slots reproduce this model in rows of up to `longest` tokens, as found by trial."""
    if model.config._attn_implementation not in ("sdpa", "eager") or model.base_model is model:
        return False  # the kernels of others fail on the mask of `Place`, on a GPU in a way that ends the process
    # A trial of random tokens may miss a window: what it cuts off may weigh next to nothing.
    if any(getattr(layer, "sliding_window", longest) < longest for layer in DynamicCache(config=model.config).layers):
        return False
    known = _known.setdefault(model, {})
    for crossing in crossings(model, longest):
        if crossing not in known:
            known[crossing] = _agrees(model, crossing)
        if not known[crossing]:
            return False
    return True


@torch.no_grad()
def _agrees(model: PreTrainedModel, crossing: Crossing) -> bool:
    """Compare tokens of two rows across a length in slots with forward passes over the whole rows."""
    whole, read = rows_across(model, crossing)
    slots, place = torch.arange(2, device=model.device), Place(2, model.device)
    prompts = torch.nn.utils.rnn.pad_sequence([ids[:n] for ids, n in zip(whole, read, strict=True)], batch_first=True)
    mask_dtype = model.dtype if model.config._attn_implementation == "eager" else None
    try:
        wanted = [model.base_model(ids[None], use_cache=False).last_hidden_state[0] for ids in whole]
        cache = DynamicCache(config=model.config)
        model.base_model(prompts, **reading(model.base_model, cache))
        layers = [SlotLayer(place, layer, settled(crossing.end)) for layer in cache.layers]
        for layer, prompt in zip(layers, cache.layers, strict=True):
            layer.put(slots, prompt, slots)
        joined = _joined(model, layers)
        for step in range(STEPS):
            at = [n + step for n in read]
            place.position[:] = torch.tensor(at)
            place.width = settled(max(at) + 1)
            found = model.base_model(
                input_ids=torch.stack([ids[n : n + 1] for ids, n in zip(whole, at, strict=True)]),
                position_ids=place.position[:, None],
                attention_mask=place.attention(mask_dtype),
                **reading(model.base_model, joined),
            ).last_hidden_state[:, 0]
            for states, own, n in zip(found, wanted, at, strict=True):
                # Wide enough for bfloat16; a model that ignores mask or positions differs by far more.
                if (states - own[n]).abs().max() > 0.05 * own[n].abs().max():
                    return False
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError):
        return False
    return True
