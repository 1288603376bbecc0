"""Cut responses where they begin to repeat themselves, and adapt the sampled length to what is left.

Response y_1..y_T ends in a loop of period p from position e on where

    y_t = y_{t-p}  for all t > e,   T - e >= repeated   and   (T - e) / p >= rounds,

with p at most `period`; of several periods, the one with the smallest e counts. The teacher confirms the loop if its
geometric mean probability of the tokens after e is at least `confirmed`: it would keep repeating too, and has nothing
to teach there. The effective length is then e, otherwise T. Tokens after e are not trained on. The next step samples up
to `growth` times the quantile `quantile` of the effective lengths. So the window starts at `first` tokens, grows as
responses fill it, and shrinks again if loops fill it.

After the idea of ShortOPD (arXiv 2607.13124), of which only the abstract was available to us. Its parts are the
repetitive suffix, the teacher's confirmation, and budgets that follow effective lengths; detector, quantile and growth
are ours.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.methods.windows.windows import FollowingController
from student.plugin.controllers import ControllerSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from student.data.row import Row
    from student.plugin.controllers import Services


class EffectiveLengthSettings(ControllerSettings):
    """Settings of windows by effective length."""

    first: int | None = Field(
        None, ge=1, description="Window of the first step in tokens; null means rollout.max_new_tokens."
    )
    period: int = Field(32, ge=1, description="Longest period of a loop in tokens.")
    repeated: int = Field(16, ge=1, description="Minimum number of repeated tokens for a suffix to count as a loop.")
    rounds: float = Field(2.0, ge=1, description="Minimum number of repetitions for a suffix to count as a loop.")
    confirmed: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Minimum geometric mean probability that the teacher gives the loop for it to be cut; 0 cuts "
        "it without asking a teacher.",
    )
    quantile: float = Field(
        0.9, gt=0, le=1, description="Quantile of the effective lengths from which the next window is set."
    )
    growth: float = Field(1.25, ge=1, description="Ratio of the next window to that quantile.")
    shortest: int = Field(8, ge=1, description="Minimum window in tokens.")


class EffectiveLength(FollowingController[EffectiveLengthSettings]):
    """Ends responses where they begin to repeat themselves.

    Its state is the window.
    """

    def __init__(self, settings: EffectiveLengthSettings) -> None:
        super().__init__(settings)
        self.chosen = settings.first

    def needs(self) -> Needs:
        """The teacher's log-probs of the sampled tokens, if the teacher confirms loops."""
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),)) if self.settings.confirmed else Needs()

    def compose(self, rows: list[Row]) -> list[Row]:
        """Mask the loop of each row, and note its effective length for the next window."""
        s = self.settings
        for row in rows:
            # What an environment wrote may repeat itself; a loop is the student's, after that.
            begin = 0
            if not row.written.all():
                begin = int(np.flatnonzero(~row.written)[-1]) + 1
            end = begin + loop_start(row.response_ids[begin:], period=s.period, repeated=s.repeated, rounds=s.rounds)
            if end < row.length and not self._confirmed(row, end):
                end = row.length
            row.notes["effective_length"] = end
            row.notes["looped_tokens"] = int(row.loss_mask[end:].sum())
            row.loss_mask[end:] = False
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics window (tokens, of this step), effective_length (mean) and looped_tokens; then the next applies."""
        found = [outcome.notes for outcome in services.outcomes if "effective_length" in outcome.notes]
        metrics = {"window": float(self.current)}
        if not found:
            return metrics
        s, lengths = self.settings, [notes["effective_length"] for notes in found]
        reach = math.ceil(float(np.quantile(lengths, s.quantile)) * s.growth)
        self.chosen = min(self.limit, max(s.shortest, reach))
        return metrics | {
            "effective_length": float(np.mean(lengths)),
            "looped_tokens": float(sum(notes["looped_tokens"] for notes in found)),
        }

    def _confirmed(self, row: Row, start: int) -> bool:
        if not self.settings.confirmed:
            return True
        sampled = row.signals[TEACHER, PayloadKind.SAMPLED].sampled
        return sampled is not None and float(np.mean(sampled[start:])) >= math.log(self.settings.confirmed)


def loop_start(ids: NDArray[np.uint32], *, period: int, repeated: int, rounds: float) -> int:
    """The position from which a response repeats itself with some period to its end; its length if it does not.

    Args:
        ids: [T] ids of the response.
        period: longest period to look for.
        repeated: minimum number of repeated tokens.
        rounds: minimum number of periods that they fill.

    Returns:
        The smallest such position, e in the module docstring.
    """
    length, start = len(ids), len(ids)
    for p in range(1, min(period, length - 1) + 1):
        differs = np.flatnonzero(ids[p:] != ids[:-p])
        e = (int(differs[-1]) + 1 if len(differs) else 0) + p
        if length - e >= repeated and (length - e) / p >= rounds:
            start = min(start, e)
    return start
