"""The length beyond which a row changes the positions of all rows in its pass (LongRoPE), tried once per model."""

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from opd.lengths import most_positions, position_turn
from student.model.sibling import sibling

_UNSTATED = 8192
"""Positions that a model is taken to be made for if its config states none."""
_known: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def turn_of(lm: PreTrainedModel) -> int | None:
    """The longest row that may share a forward pass with all shorter ones; None if every row may.

    Rows may be longer than the model was made for, so it is tried on twice as many positions. A table of positions may
    end before, which only a CPU reports as an error that can be caught. Elsewhere, a small model of the family is
    tried on the CPU; its float32 also shows what half precision would round away.
    """
    if lm not in _known:
        most = most_positions(lm.config) or _UNSTATED
        tried = lm if lm.device.type in ("cpu", "meta") else sibling(lm.config)
        turn = None if tried is None else position_turn(tried, 2 * most)
        _known[lm] = None if turn is None else turn.length
    return _known[lm]
