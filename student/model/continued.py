"""Reads several sequences after a common prefix, which is read once and gets the gradient of all of them.

The prefixes are read first, without padding between their tokens. Their keys and values are then repeated for the
sequences that continue them, layer by layer, where what is kept for the backward pass depends only on the layer's
inputs. A layer that runs again in the backward pass (gradient checkpointing) therefore finds what it found before.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from opd.kv_cache import reading
from student.data.prefixes import Prefixes
from student.model.sibling import sibling
from student.model.trial import Crossing, crossings, rows_across
from student.model.turn import turn_of

_known: WeakKeyDictionary[PreTrainedModel, dict[Crossing, bool]] = WeakKeyDictionary()
"""Whether each model continues prefixes across each length that was tried."""


class _Layer(DynamicLayer):
    """Keys and values of one layer in one pass, with gradient.

    Args:
        prefix: keys and values of the prefixes, and the prefix of each sequence; None while prefixes are read.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, prefix: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.prefix = prefix

    def get_seq_length(self) -> int:
        """Number of columns before those of the pass."""
        return 0 if self.prefix is None else self.prefix[0].shape[2]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to."""
        self.keys, self.values = key_states, value_states
        if self.prefix is None:
            return key_states, value_states
        keys, values, of = self.prefix
        return torch.cat([keys[of], key_states], 2), torch.cat([values[of], value_states], 2)


def states_after(
    lm: PreTrainedModel,
    prefixes: Prefixes,
    input_ids: Int[Tensor, "b l"],
    attention_mask: Int[Tensor, "b l"],
    row: Int[Tensor, " n"],
    source: Int[Tensor, " n"],
) -> Float[Tensor, "n h"]:
    """Final hidden states [N, H] at positions (row, source) of sequences that continue prefixes.

    Args:
        lm: a model for which `continues` is true.
        prefixes: what is read once.
        input_ids: [B, L] what follows, right-padded.
        attention_mask: [B, L] where it is.
        row: [N] sequence of each position.
        source: [N] column of each position, counted from the beginning of its prefix.
    """
    count, width = prefixes.ids.shape
    first = [_Layer() for _ in _cache(lm).layers]
    # Padding on the right needs no mask, except by attention that builds none itself.
    columns = torch.arange(width, device=source.device)
    mask = None if lm.config._attn_implementation == "sdpa" else (columns < prefixes.lengths[:, None]).long()
    read = lm.base_model(
        input_ids=prefixes.ids, attention_mask=mask, **reading(lm.base_model, _cache(lm, first))
    ).last_hidden_state
    pairs = [(layer.keys, layer.values) for layer in first]
    rest, _ = read_on(lm, pairs, prefixes.lengths, prefixes.of, input_ids, attention_mask.sum(1))
    begin = prefixes.lengths[prefixes.of][row]
    at = torch.where(
        source < begin,
        prefixes.of[row] * width + source,
        count * width + row * input_ids.shape[1] + source - begin,
    )
    # Both, even if no state of a prefix is wanted: a sharded layer gathers its weights once its output has a gradient.
    return torch.cat([read.flatten(0, 1), rest.flatten(0, 1)])[at]


def read_on(
    lm: PreTrainedModel,
    pairs: Sequence[tuple[Tensor, Tensor]],
    lengths: Int[Tensor, " g"],
    of: Int[Tensor, " b"],
    input_ids: Int[Tensor, "b l"],
    tokens: Int[Tensor, " b"],
) -> tuple[Float[Tensor, "b l h"], list[tuple[Tensor, Tensor]]]:
    """Read what follows prefixes.

    Args:
        lm: a model for which `continues` is true.
        pairs: keys and values [G, heads, P, head size] of the prefixes, by layer.
        lengths: [G] number of tokens of each.
        of: [B] the prefix of each sequence.
        input_ids: [B, L] what follows, right-padded.
        tokens: [B] how much of it there is.

    Returns:
        Final hidden states, and keys and values [B, heads, L, head size] of what was read, by layer.
    """
    begin, since = lengths[of][:, None], torch.arange(input_ids.shape[1], device=of.device)
    layers = [_Layer((keys, values, of)) for keys, values in pairs]
    states = lm.base_model(
        input_ids=input_ids,
        # Padding stays at the last position, because a table of positions may end there.
        position_ids=torch.minimum(begin + since, begin + tokens[:, None] - 1),
        attention_mask=_mask(lengths, of, pairs[0][0].shape[2], input_ids.shape[1], _dtype(pairs[0][0])),
        **reading(lm.base_model, _cache(lm, layers)),
    ).last_hidden_state
    return states, [(layer.keys, layer.values) for layer in layers]


def _cache(lm: PreTrainedModel, layers: Sequence[_Layer] | None = None) -> DynamicCache:
    cache = DynamicCache(config=lm.config)
    if layers is not None:
        cache.layers = list(layers)
    return cache


def _dtype(keys: Tensor) -> torch.dtype:
    """The dtype in which attention is computed: a mask of it is shared by all layers, and no layer keeps a copy."""
    kind = keys.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else keys.dtype


def _mask(lengths: Tensor, of: Tensor, width: int, length: int, dtype: torch.dtype) -> Tensor:
    """[B or 1, 1, length, width + length], added to the scores: a sequence's prefix, and what it has read since."""
    of = of if len(lengths) > 1 else of[:1]  # one mask for all sequences of one prefix
    since = torch.arange(length, device=of.device)
    before = torch.arange(width, device=of.device) < lengths[of][:, None, None]
    seen = torch.cat([before.expand(-1, length, -1), (since <= since[:, None]).expand(len(of), -1, -1)], 2)
    return torch.zeros(seen.shape, dtype=dtype, device=of.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def continues(lm: PreTrainedModel, longest: int) -> bool:
    """Whether a model reads rows of up to `longest` tokens after prefixes as it reads them whole.

    Tried on a small model of the family in float32: hidden states, and the gradient that arrives at the prefixes.
    """
    attention, turn = lm.config._attn_implementation, turn_of(lm)
    if attention not in ("sdpa", "eager") or lm.base_model is lm or (turn is not None and longest > turn):
        return False
    layers = _cache(lm).layers
    if not all(isinstance(layer, DynamicLayer) for layer in layers):
        return False
    # As with slots, a trial of random tokens may miss a window.
    if any(getattr(layer, "sliding_window", longest) < longest for layer in layers):
        return False
    known = _known.setdefault(lm, {})
    untried = [crossing for crossing in crossings(lm, longest) if crossing not in known]
    small = sibling(lm.config, attention) if untried else None
    for crossing in untried:
        known[crossing] = small is not None and _agrees(small, crossing)
    return all(known[crossing] for crossing in crossings(lm, longest))


def _agrees(lm: PreTrainedModel, crossing: Crossing) -> bool:
    """Compare two prefixes of different lengths, each continued twice, with whole rows."""
    whole, read = rows_across(lm, crossing)
    texts = [text for ids in whole for text in (ids, torch.cat([ids[:-2], ids[:2]]))]
    of = torch.tensor([0, 0, 1, 1])
    pad = torch.nn.utils.rnn.pad_sequence
    prefixes = Prefixes(
        pad([ids[:n] for ids, n in zip(whole, read, strict=True)], batch_first=True), torch.tensor([*read]), of
    )
    rest = torch.stack([text[read[g] :] for text, g in zip(texts, of.tolist(), strict=True)])
    row = torch.cat([torch.full((len(text),), i) for i, text in enumerate(texts)])
    source = torch.cat([torch.arange(len(text)) for text in texts])
    weights: Any = lm.get_input_embeddings()

    def gradient(states: Tensor) -> Tensor:
        drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
        (found,) = torch.autograd.grad((states * drawn).sum(), weights.weight)
        return found

    try:
        with torch.enable_grad():
            wanted = torch.cat([lm.base_model(text[None], use_cache=False).last_hidden_state[0] for text in texts])
            found = states_after(lm, prefixes, rest, torch.ones_like(rest), row, source)
            pairs = [(found.detach(), wanted.detach()), (gradient(found), gradient(wanted))]
    except (TypeError, ValueError, RuntimeError, AttributeError, AssertionError, IndexError):
        return False
    return all((a - b).abs().max() <= 1e-3 * b.abs().max() for a, b in pairs)
