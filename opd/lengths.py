"""Lengths at which a model may change: those that its config states, and, by trial, where its positions do.

A config states lengths under many names: positions, windows, chunks. They are taken as guesses of where to try a model.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

LENGTHS = r"window|position|chunk|conv|block|length|seq_len|context|n_ctx"
"""Names in configs that may stand for a number of tokens; a length too many costs a few forward passes."""
POSITIONS = r"position|seq_len|n_ctx|context|model_max_length"
"""Names in configs that may stand for a number of positions."""
_MOST = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len"),
    *("model_max_length", "context_length", "max_context_length", "seq_length", "n_ctx", "max_target_positions"),
)
"""Names of the number of positions that a model was made for; the first that a config has counts."""


def stated(config: Any, pattern: str = LENGTHS) -> set[int]:
    """The numbers in a transformers config, at any depth, whose names match `pattern`."""
    return _stated(config.to_dict(), pattern, "")


def _stated(value: Any, pattern: str, name: str) -> set[int]:
    if isinstance(value, dict):
        return {found for key, one in value.items() for found in _stated(one, pattern, str(key))}
    return {value} if isinstance(value, int) and not isinstance(value, bool) and re.search(pattern, name) else set()


def most_positions(config: Any) -> int | None:
    """The number of positions that a model was made for, from its transformers config; None if it states none."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _MOST)
    return next((most for most in found if isinstance(most, int) and not isinstance(most, bool) and most > 1), None)


@torch.no_grad()
def position_turn(states: Callable[[Tensor, Tensor], Tensor], lengths: Iterable[int], most: int) -> int | None:
    """Find by trial the length beyond which a row changes the positions of all rows in its pass; None if there is none.

    Tokens at the first positions are read together with one far behind, which must not change them.

    Args:
        states: hidden states [1, L, H] of ids [1, L] at position ids [1, L], which need not follow each other.
        lengths: where to try.
        most: the longest row that the model may read; no position beyond is used.
    """
    ids = torch.arange(1, 5)[None]

    def first(length: int) -> Tensor:
        """Hidden states of the first three tokens in a row whose last token is at position `length` - 1."""
        return states(ids, torch.tensor([[0, 1, 2, length - 1]]))[0, :3]

    try:
        # The last length that makes a difference, because beyond an earlier one rows of both kinds share a pass.
        for length in sorted((n for n in lengths if 4 < n < most), reverse=True):
            # A shorter row ends what some models keep of the longest row before.
            short, far, _ = first(length - 1), first(most), first(length - 1)
            if not _same(short, far):
                return length
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None  # it takes no position ids, and so scales none by a row's length
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    # The shapes are the same, so that nothing rounds otherwise, except among the experts of a mixture.
    least = 1e-4 if one.dtype == torch.float32 else 1e-2
    return bool((one.float() - other.float()).abs().max() <= least * one.float().abs().max())
