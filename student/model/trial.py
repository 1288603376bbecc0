"""Trials: does a model that is decoded token by token give what one pass over the whole row gives?

A trial decodes the last tokens of two short rows with a cache and compares them with whole passes. At a length that
the config states, under whatever name (a sliding window, a chunk, the positions of the first training), the cache or
the positions may change, so the trial is repeated across each of its numbers, up to the longest row that is to be
decoded. A number that means something else costs a few forward passes.

What is found is kept for a model while its process lives, and not on disk: for a random model of 135M parameters the
short trial takes 0.9 s with slots and 1.4 s with batches on one thread of a processor, less than reading its weights.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from opd.lengths import stated, within

STEPS = 4
_SHORT = 5
_ROWS = 2


class Crossing(NamedTuple):
    """A length across which to try, and how long the longer of the two rows is."""

    length: int
    end: int


class Rows(NamedTuple):
    """Two rows that cross a length.

    Attributes:
        whole: [2] tensors of ids, STEPS tokens longer than what is read at once.
        read: numbers of tokens that are read at once.
    """

    whole: tuple[Tensor, Tensor]
    read: tuple[int, int]


def crossings(model: PreTrainedModel, longest: int) -> list[Crossing]:
    """Where to try: across a short length, and across those below `longest` that the config states.

    These have no more than some rows' tokens in all; what is left out then are short ones.
    """
    found = within((n for n in stated(model.config) if _SHORT < n < longest), _ROWS * longest)
    beyond = [Crossing(n, min(n + 2 * STEPS, longest)) for n in found]
    return [Crossing(_SHORT, _SHORT + 2), *beyond]


def rows_across(model: PreTrainedModel, crossing: Crossing) -> Rows:
    """Random rows of which one ends a token after the length, and the other one is already read beyond it.

    A window cuts off more keys of the second row, and its cache no longer holds all that was read: the few keys that
    the first row loses may weigh next to nothing.
    """
    embeddings: Any = model.get_input_embeddings()
    vocabulary, (length, end) = len(embeddings.weight), crossing
    ids = torch.randint(0, vocabulary, (2, end), generator=torch.Generator().manual_seed(0)).to(model.device)
    return Rows((ids[0], ids[1, : length + 1]), (end - STEPS, length + 1 - STEPS))
