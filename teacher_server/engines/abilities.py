"""Trials of a freshly loaded model: does its head reproduce its logits, and which shortcuts are exact?

Measured for every model, because a list of model families would go out of date.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.utils.import_utils import is_flash_attn_2_available

from opd.errors import ConfigError
from opd.heads import OutputHead
from opd.kv_cache import kept_by
from opd.lengths import most_positions, position_turn, positions_end, stated, within
from opd.wire.types import ScoreItem
from teacher_server.engines.backbone import Backbone, shareable

_log = logging.getLogger(__name__)
_FLASH = "flash_attention_2"
_UNSTATED = 1 << 20
_BEYOND = 9
_LONGEST = 8192
"""Tokens beyond which attention, which grows with their square, would make trials slow."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The shortcuts that leave this model's numbers unchanged: right padding, packing, shared prompts."""

    padding: bool
    packing: bool
    sharing: bool


def check_head(model: nn.Module, backbone: Backbone, head: OutputHead, name: str) -> None:
    """Compare hidden states projected by the head with the model's own logits.

    Raises:
        ConfigError: if they differ, which means that the family transforms its logits in a way unknown to this engine.
    """
    item = _items(head.vocab_size)[0]
    ids = torch.from_numpy(item.token_ids.astype(np.int64))[None].to(backbone.device)
    own: Tensor = model(input_ids=ids).logits[0, item.prompt_length - 1 : -1, : head.vocab_size].float()
    gap = _gap(own, head.logits(backbone.alone(item)))
    if not gap <= _tolerance(head):  # negated, so that NaN fails
        family = getattr(getattr(model, "config", None), "model_type", "?")
        raise ConfigError(
            f"model {name} of family {family!r} turns hidden states into logits in a way the transformers engine does "
            f"not reproduce (relative error {gap:.2g}); serve it with another engine."
        )


def speed_attention(model: Any, backbone: Backbone, head: OutputHead) -> None:
    """Let the model run with flash attention if it is installed and gives the hidden states that the model has now."""
    # Where it is not, transformers would fetch and run a kernel from the hub.
    if not is_flash_attn_2_available():
        return
    items, usual = _items(head.vocab_size), model.config._attn_implementation
    own = torch.cat([backbone.alone(item) for item in items])
    try:
        model.set_attn_implementation(_FLASH)
        gap = _gap(own, torch.cat([backbone.alone(item) for item in items]))
        reason = "" if gap <= _tolerance(head) else f"it changes hidden states by {gap:.2g}"
    except Exception as error:  # a model, a dtype or a device may refuse it with any exception
        reason = str(error)
    if reason:
        _log.warning("attention stays %s, because %s was tried: %s", usual, _FLASH, reason)
        model.set_attn_implementation(usual)


def find_abilities(
    backbone: Backbone, head: OutputHead, lengths: Iterable[int] = (), *, packing: bool, sharing: bool
) -> Abilities:
    """Measure which shortcuts reproduce the hidden states of rows that are run alone, short ones and across `lengths`.

    Args:
        backbone: the base model.
        head: the output head, of which only vocabulary size and dtype are used.
        lengths: where the model may change, as with a sliding window.
        packing: whether packing may be used: whether the attention backend keeps packed sequences apart without a mask.
        sharing: whether shared prompts may be used.
    """
    trials = [_items(head.vocab_size), *(_across(head.vocab_size, length) for length in sorted(lengths))]
    alone = [torch.cat([backbone.alone(item) for item in items]) for items in trials]
    tolerance = _tolerance(head)

    def exact(way: str, run: Callable[[list[ScoreItem]], Float[Tensor, "N H"]]) -> bool:
        try:
            gaps = [_gap(states, run(items)) for states, items in zip(alone, trials, strict=True)]
        except Exception as error:  # a model may refuse a shortcut with any exception
            _log.info("%s is off: the model refused it: %s", way, error)
            return False
        for gap, items in zip(gaps, trials, strict=True):
            if not gap <= tolerance:
                tokens = max(len(item.token_ids) for item in items)
                _log.warning("%s is off: it changes hidden states in rows of %d tokens by %.2g", way, tokens, gap)
                return False
        return True

    found = Abilities(
        padding=exact("padding", backbone.padded),
        packing=packing and exact("packing", backbone.packed),
        sharing=sharing and _keeps_only_keys(backbone, trials[0][0]) and exact("prompt sharing", backbone.shared),
    )
    backbone.forget()
    return found


def find_positions(config: Any, backbone: Backbone) -> tuple[int, int | None]:
    """The most tokens that a model takes, and the length beyond which rows share no forward pass with shorter ones."""
    base: Any = backbone.model
    most = most_positions(config)
    # A table of positions may end anywhere if the config states no number, which only a CPU survives to report.
    if most is None and backbone.device.type == "cpu":
        most = positions_end(base, _LONGEST, _affordable(backbone))
        turn = position_turn(base, most or _LONGEST)
    else:
        turn = None if most is None else position_turn(base, most)
    return most or _UNSTATED, None if turn is None else turn.length


def lengths_to_try(config: Any, backbone: Backbone, most: int) -> list[int]:
    """The lengths that a model's config states, as far as trials of shortcuts across them take seconds.

    Args:
        config: the transformers config.
        backbone: the base model.
        most: most tokens of a row that may share a forward pass with others.
    """
    return within((n for n in stated(config) if 4 < n <= min(most - _BEYOND, _LONGEST)), _affordable(backbone))


def _affordable(backbone: Backbone) -> float:
    """Tokens that five rows may have each in trials that take seconds."""
    flops = 10 * sum(parameter.numel() for parameter in backbone.model.parameters())
    return (5e11 if backbone.device.type == "cpu" else 3e15) / max(1, flops)


def rows_are_independent(digest: Callable[[list[ScoreItem]], list[bytes]], vocabulary: int, most: int) -> bool:
    """Whether rows of settled widths have the same bits alone, in a batch, and in that batch reversed.

    Whether a matrix product gives a row the same bits among 16 rows as among 2,000 depends on the library, the
    processor and the number of threads, so it is measured instead of assumed. A model in which rows interact in other
    ways (experts with a capacity per batch) fails the test as well.

    Args:
        digest: returns the bits of each item's scores, computed as in deterministic mode.
        vocabulary: number of ids that the model has.
        most: most tokens that the model takes.
    """
    draw = np.random.default_rng(0)
    lengths = [(4, 1), (3, 9), (10, 7), (8, 25), (30, 2), (20, 20), (5, 60), (40, 24), (100, 30), (90, 36)]
    items = [
        ScoreItem(draw.integers(0, vocabulary, prompt + response, dtype=np.uint32), prompt)
        for prompt, response in lengths
        if prompt + response <= most
    ]
    alone = [digest([item])[0] for item in items]
    same = digest(items) == alone == digest(items[::-1])[::-1]
    if not same:
        _log.warning("the numbers of this model depend on the batch here; deterministic mode runs every row by itself")
    return same


def _keeps_only_keys(backbone: Backbone, item: ScoreItem) -> bool:
    ids = torch.from_numpy(item.token_ids.astype(np.int64))[None].to(backbone.device)
    # Models without attention (Mamba) call their cache something else.
    return shareable(kept_by(backbone.model(input_ids=ids, use_cache=True)))


def _items(vocabulary: int) -> list[ScoreItem]:
    """Three sequences with the same prompt, a fourth with another of the same length; responses of different lengths.

    This is the least that uses every shortcut: padding, packing, a shared prompt, and two prompts in one pass.
    """
    draw = np.random.default_rng(0).integers(0, vocabulary, size=(4, 12), dtype=np.uint32)
    draw[1:3, :5] = draw[0, :5]
    return [ScoreItem(row[:length], 5) for row, length in zip(draw, (12, 9, 6, 11), strict=True)]


def _across(vocabulary: int, length: int) -> list[ScoreItem]:
    """Two samples of a prompt that end beyond a length, the second one just."""
    ids = np.random.default_rng(0).integers(0, vocabulary, size=(2, length + _BEYOND), dtype=np.uint32)
    ids[1, : length - 3] = ids[0, : length - 3]
    return [ScoreItem(ids[0], length - 3), ScoreItem(ids[1, : length + 2], length - 3)]


def _gap(expected: Tensor, found: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    expected, found = expected.float(), found.float()
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-12))


def _tolerance(head: OutputHead) -> float:
    return 1e-4 if head.weight.dtype == torch.float32 else 5e-2
