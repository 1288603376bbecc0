"""SeeUPO (arXiv 2602.06554): one optimizer update for each turn, the last turn first.

    for k = K, ..., 1:
        update on the tokens of turn k alone, each row's loss times M, old log-probs read again before it
        s  = exp(mean over the tokens of turn k of log pi_new - log pi_old)
        M <- clip(M clip(s, 1 - bound, 1 + bound), 1 - bound, 1 + bound),   M = 1 at first

Later turns are learnt under the turns before them as they were sampled, and M corrects earlier turns for what has moved
behind them. Its losses are GSPO's on each turn: objective gspo with `ratio_to: old`, whose ratio is of the turn because
no other tokens count, and advantage lite_ppo. An update of a step becomes as many as its longest episode has turns; a
turn that no row of any rank has is left out. Evidence: text and code (modelscope/AgentEvolver, branch seeupo, read):
bound 0.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from student.controllers import Controller, ControllerSettings
from student.scoring.needs import STUDENT, Needs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from student.controllers import Services
    from student.data.row import Row
    from student.learning.terms import Term
    from student.learning.updates import Update
    from student.recipe import Recipe


class SeeUpoSettings(ControllerSettings):
    """Settings of the order."""

    bound: float = Field(0.2, gt=0, lt=1, description="How far a turn's ratio, and their product, may be from 1.")


class SeeUpo(Controller):
    """The method; its state is what the last step's updates did, until it has been told."""

    settings_type = SeeUpoSettings
    settings: SeeUpoSettings
    why_not_stale = "it compares the weights before and after each turn's update with those that sampled"
    evidence: ClassVar[str] = "text and code"

    def __init__(self, settings: SeeUpoSettings) -> None:
        super().__init__(settings)
        self._made = 0.0
        self._products = (0.0, 0.0)  # sum and number of the M at the end of updates

    def needs(self) -> Needs:
        """The student, which reads each turn before and after its update."""
        return Needs(models=frozenset({STUDENT}))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse terms whose old log-probs would not be those of the turn's update.

        Raises:
            ConfigError: with the setting to change.
        """
        if not any(getattr(term.settings, "ratio_to", "") == "old" for term in terms):
            raise ConfigError(
                "method seeupo reads old log-probs again before each turn, but no term looks at them; use objective "
                "gspo with ratio_to: old."
            )

    def updates(self, updates: Iterable[Update], services: Services) -> Iterator[Update]:
        """Each update turn by turn, the last one first."""
        self._made, self._products = 0.0, (0.0, 0.0)
        for update in updates:
            yield from self._by_turn(update, services)
        # Told to all ranks here, because one rank's state is what a checkpoint holds.
        told = services.gather(self._products)
        self._products = sum(one[0] for one in told), sum(one[1] for one in told)

    def _by_turn(self, update: Update, services: Services) -> Iterator[Update]:
        rows = update.rows
        masks, weights = [row.loss_mask for row in rows], [row.weight for row in rows]
        products = np.ones(len(rows))
        try:
            # As many turns on every rank as the longest episode of any has: each is an update that all take together.
            for turn in reversed(range(max(services.gather(max((_turns(row) for row in rows), default=0))))):
                parts = [_of_turn(row, mask, turn) for row, mask in zip(rows, masks, strict=True)]
                if not any(services.gather(any(part.any() for part in parts))):
                    continue
                for row, part, weight, product in zip(rows, parts, weights, products, strict=True):
                    row.loss_mask, row.weight = part, weight * float(product)
                mine = [place for place, part in enumerate(parts) if part.any()]
                chosen = tuple(rows[place] for place in mine)
                # Read now: the updates of later turns have moved the policy since the rows were scored.
                before = self._log_probs(chosen, services)
                yield replace(update, rows=chosen, recompute=True)
                self._made += 1
                for place, old, new in zip(mine, before, self._log_probs(chosen, services), strict=True):
                    ratio = float(np.exp((new - old)[parts[place]].mean(dtype=np.float64)))
                    products[place] = self.product(products[place], ratio)
            total, count = self._products
            self._products = total + float(products.sum()), count + len(products)
        finally:
            # Also where an update failed: the rows are taken again, or told of in metrics, as they were.
            for row, mask, weight in zip(rows, masks, weights, strict=True):
                row.loss_mask, row.weight = mask, weight

    def product(self, product: float, ratio: float) -> float:
        """M after a turn whose ratio moved to `ratio`."""
        low, high = 1 - self.settings.bound, 1 + self.settings.bound
        return float(np.clip(product * np.clip(ratio, low, high), low, high))

    @staticmethod
    def _log_probs(rows: Sequence[Row], services: Services) -> list[NDArray[np.float32]]:
        return [np.asarray(scores.sampled, np.float32) for scores in services.read(rows)]

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics turn_updates (of the step) and turn_ratio_product (mean of M at the end of an update)."""
        total, count = self._products
        return {"turn_updates": self._made} | ({"turn_ratio_product": total / count} if count else {})

    def state_dict(self) -> dict[str, Any]:
        """What `after_update` has to tell, where a run was stopped before it."""
        return {"made": self._made, "products": list(self._products)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""
        total, count = state["products"]
        self._made, self._products = float(state["made"]), (float(total), float(count))


def _turns(row: Row) -> int:
    return max(1, len(row.turns))


def _of_turn(row: Row, mask: NDArray[np.bool_], turn: int) -> NDArray[np.bool_]:
    """The trained tokens of one turn; a row without turns is one."""
    if not row.turns:
        return mask if turn == 0 else np.zeros_like(mask)
    found = np.zeros_like(mask)
    if turn < len(row.turns):
        start, end = row.turns[turn]
        found[start:end] = mask[start:end]
    return found
