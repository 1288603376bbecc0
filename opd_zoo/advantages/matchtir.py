"""MatchTIR's credit (arXiv 2601.10712): half from the episode's total reward, half from the return of each turn.

    G_k   r_k + gamma G_(k+1),   r_k by turn (reward `matchtir`)
    A_k   ((sum r - mean) / std over the prompt's episodes + (G_k - mean G) / std over turn k of them) / 2

Evidence: text and code (quchangle1/MatchTIR, read): gamma 0.9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opd_zoo.advantages.turns import TurnAdvantage, normalised
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class MatchTir(TurnAdvantage, defaults={"discount": 0.9}):
    """Half the credit from the episode, half from each turn (MatchTIR)."""

    evidence = "text and code"
    traits = Traits(least_group=2, shift_free="group", scale_free="group", reads=("turns",))

    def of_turns(
        self, returns: Sequence[NDArray[np.float64]], groups: Sequence[Sequence[tuple[int, int]]]
    ) -> list[NDArray[np.float64]]:
        gamma = self.settings.discount
        # The episode's summed rewards, recovered from its returns: r_k = G_k - gamma G_(k+1).
        sums = [float(g.sum() - gamma * g[1:].sum()) for g in returns]
        found = [values * 0.0 for values in returns]
        for group in groups:
            if group[0][1] == 0:  # every episode has a first turn
                whole = normalised([sums[episode] for episode, _ in group], scale=True)
                for (episode, _), value in zip(group, whole, strict=True):
                    found[episode] += value / 2
            own = normalised([returns[episode][turn] for episode, turn in group], scale=True)
            for (episode, turn), value in zip(group, own, strict=True):
                found[episode][turn] += value / 2
        return found
