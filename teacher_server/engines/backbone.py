"""Hidden states of response positions, from the base model without its head, in the cheapest exact way.

There are four ways, all exact up to the rounding of differently shaped matrix products: a row alone (bit-equal whatever
its batch); rows padded on the right (a causal model cannot see to the right, so no mask is needed and fused kernels
apply); rows packed end to end, if the attention backend keeps them apart; and samples of one prompt that continue from
its keys and values. On a CPU, a row padded to a width that depends on the row alone is bit-equal in any batch of that
width (`teacher_server.engines.plan.settled_width`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from opd.kv_cache import kept_by, reading
from opd.wire.types import ScoreItem
from teacher_server.engines.project import to_device


class Backbone:
    """Runs the base model, from embeddings to final norm, over sequences.

    Args:
        model: a transformers base model, which takes `input_ids` and returns `last_hidden_state`.
        device: the device of its inputs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self._prefix: tuple[tuple[bytes, ...], Any, Tensor] | None = None

    def forget(self) -> None:
        """Drop the cached keys and values of the last shared prompts."""
        self._prefix = None

    def alone(self, item: ScoreItem) -> Float[Tensor, "T H"]:
        """The hidden states that predict the response of one sequence, computed without padding."""
        # Nothing is predicted after the last token, so it is not an input; position P - 1 predicts the first token of
        # the response.
        states = self._states(self._ids(item.token_ids[None, :-1]))
        return states[0, item.prompt_length - 1 :]

    def padded(self, items: Sequence[ScoreItem], width: int = 0) -> Float[Tensor, "N H"]:
        """The hidden states of all response positions, sequence after sequence; sequences are padded on the right.

        Args:
            items: the sequences.
            width: number of tokens to pad to; 0 for the length of the longest sequence.
        """
        states = self._states(self._pad([item.token_ids[:-1] for item in items], width))
        parts = [states[i, item.prompt_length - 1 : len(item.token_ids) - 1] for i, item in enumerate(items)]
        return torch.cat(parts)

    def packed(self, items: Sequence[ScoreItem]) -> Float[Tensor, "N H"]:
        """Like `padded`, with the sequences end to end; positions that restart at 0 keep them apart."""
        ids = self._ids(np.concatenate([item.token_ids[:-1] for item in items])[None])
        lengths = [len(item.token_ids) - 1 for item in items]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        states = self._states(ids, position_ids=to_device(positions, self.device))[0]
        parts, first = [], 0
        for item, length in zip(items, lengths, strict=True):
            parts.append(states[first + item.prompt_length - 1 : first + length])
            first += length
        return torch.cat(parts)

    def shared(self, items: Sequence[ScoreItem]) -> Float[Tensor, "N H"]:
        """Like `padded`, but each distinct prompt goes through the model once; all prompts must have one length."""
        prompts = [item.token_ids[: item.prompt_length] for item in items]
        # A dict instead of a set, because the cache's rows are in the order of first appearance.
        slots = {prompt.tobytes(): None for prompt in prompts}
        index = {key: slot for slot, key in enumerate(slots)}
        owner = to_device(torch.tensor([index[prompt.tobytes()] for prompt in prompts]), self.device)
        cache, last = self._prompt_cache(tuple(slots), np.stack([np.frombuffer(key, np.uint32) for key in slots]))
        first_states = last[owner]  # the prompt's last position predicts the first response token
        width = max(item.response_length for item in items) - 1
        if width == 0:
            return first_states
        ids = self._pad([item.response_ids[:-1] for item in items])
        with _Continuation(cache, owner) as continued:
            states = self._states(ids, **reading(self.model, continued))
        parts = []
        for i, item in enumerate(items):
            parts += [first_states[i : i + 1], states[i, : item.response_length - 1]]
        return torch.cat(parts)

    def _prompt_cache(self, key: tuple[bytes, ...], ids: np.ndarray) -> tuple[Any, Float[Tensor, "G H"]]:
        if self._prefix is None or self._prefix[0] != key:
            self._prefix = None  # free the old keys and values before the new ones are made
            out = self.model(input_ids=self._ids(ids), use_cache=True)
            # Cloned, because a view would keep the states of all prompt positions alive.
            self._prefix = (key, kept_by(out), out.last_hidden_state[:, -1].clone())
        return self._prefix[1], self._prefix[2]

    def _states(self, ids: Int[Tensor, "B L"], **inputs: Any) -> Float[Tensor, "B L H"]:
        inputs.setdefault("use_cache", False)
        states: Tensor = self.model(input_ids=ids, **inputs).last_hidden_state
        return states

    def _ids(self, ids: np.ndarray) -> Int[Tensor, "B L"]:
        return to_device(torch.from_numpy(ids.astype(np.int64)), self.device)

    def _pad(self, rows: Sequence[np.ndarray], width: int = 0) -> Int[Tensor, "B L"]:
        # The padding id does not matter, since no real position sees it; 0 exists in every vocabulary.
        out = np.zeros((len(rows), width or max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return self._ids(out)


class _Continuation:
    """A prompt cache that one forward pass over `len(owner)` rows may use, and that is restored afterwards.

    Each attention layer sees the keys of its row's prompt followed by the new ones. Nothing is stored, so prompts are
    repeated for one layer at a time only.

    It replaces `update` of the cache's layers, the method through which attention in transformers reads and extends
    keys and values; `DynamicCache.batch_repeat_interleave` would repeat all layers at once.
    """

    def __init__(self, cache: Any, owner: Int[Tensor, " B"]) -> None:
        self._cache = cache
        self._owner = owner

    def __enter__(self) -> Any:
        for layer in self._cache.layers:
            layer.update = self._update_without_storing(layer)
        return self._cache

    def __exit__(self, *error: object) -> None:
        for layer in self._cache.layers:
            layer.__dict__.pop("update", None)  # uncovers the method of the class

    def _update_without_storing(self, layer: Any) -> Any:
        original = layer.update
        # Sliding-window layers count the tokens they have seen; rows that are removed again must not count.
        counter = getattr(layer, "cumulative_length", None)

        def update(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            kept = layer.keys, layer.values
            layer.keys, layer.values = (tensor.index_select(0, self._owner) for tensor in kept)
            try:
                full: tuple[Tensor, Tensor] = original(keys, values, *args, **kwargs)
            finally:
                layer.keys, layer.values = kept
                if counter is not None:
                    layer.cumulative_length = counter
            return full

        return update


def shareable(cache: Any) -> bool:
    """Whether a cache holds only keys and values: no recurrent or convolutional state, and nothing compressed."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = getattr(cache, "layers", None) or ()
    return len(layers) > 0 and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
