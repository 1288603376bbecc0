"""Rows in stores of earlier versions, which asked for every response position where spans are asked for today."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from opd.fleet.record.row import score_key
from opd.wire.spans import cut, whole
from opd.wire.types import PayloadSpec, ScoreItem, Scores


def find(
    read: Callable[[str], Scores | None], weights_hash: str, item: ScoreItem, spec: PayloadSpec, temperature: float
) -> Scores | None:
    """The scores of a row, cut from those of its whole response if the store only has these; None if it has neither."""
    for asked in _ways(item):
        scores = read(score_key(weights_hash, asked, spec, temperature))
        if scores is not None:
            return scores if asked is item else cut(scores, item)
    return None


def _ways(item: ScoreItem) -> Iterator[ScoreItem]:
    """The item, and the forms in which earlier versions asked for it.

    Where nothing was wanted they asked for the ids 0 to K - 1, or for the same ids at every position, as
    `teachers.map_stops` does for stop tokens.
    """
    yield item
    if not item.spans:
        return
    yield whole(item)
    ids = item.gather_ids
    if ids is not None and (ids == ids[0]).all():
        everywhere = np.ascontiguousarray(np.broadcast_to(ids[0], (item.response_length, ids.shape[1])))
        yield replace(item, gather_ids=everywhere, spans=())
