"""SeeUPO (arXiv 2602.06554): a separate optimizer update for each turn of an episode, the last turn first.

    for k = K, ..., 1:
        update on the tokens of turn k alone, each row's loss times M, old log-probs read again before it
        s  = exp(mean over the tokens of turn k of log pi_new - log pi_old)
        M <- clip(M clip(s, 1 - bound, 1 + bound), 1 - bound, 1 + bound),   M = 1 at first

When turn k is learnt, the turns before it are as they were sampled, and M corrects for how far the updates of the later
turns have already moved the policy. The paper's loss is GSPO's on each turn: objective gspo with `ratio_to: old`, whose
ratio is that of the turn because no other tokens count, and advantage lite_ppo. Each update of a step becomes as many
as its longest episode has turns; a turn without trained tokens on any rank is skipped. Evidence: text and code
(modelscope/AgentEvolver, branch seeupo, read): bound 0.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from student.data.needs import STUDENT, Needs
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from student.data.row import Row
    from student.learning.updates import Update
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class SeeUpoSettings(ControllerSettings):
    """Settings of SeeUPO."""

    bound: float = Field(
        0.2, gt=0, lt=1, description="Largest distance from 1 of a turn's ratio, and of the product of the ratios."
    )


class SeeUpo(Controller[SeeUpoSettings]):
    """Makes a separate update for each turn of the episodes, the last one first (SeeUPO).

    Its state is the last step's counts, until they are reported.
    """

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        why={"works_ahead": "it compares the weights before and after each turn's update with those that sampled"}
    )

    def __init__(self, settings: SeeUpoSettings) -> None:
        super().__init__(settings)
        self._made = 0.0
        self._products = (0.0, 0.0)  # sum and number of the rows' M at the end of each update

    def needs(self) -> Needs:
        """The student, which scores each turn before and after its update."""
        return Needs(models=frozenset({STUDENT}))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse an objective without a ratio to the old log-probs, which this method refreshes before each turn.

        Raises:
            ConfigError: with the setting to change.
        """
        if not any(getattr(term.settings, "ratio_to", "") == "old" for term in terms):
            raise ConfigError(
                "method seeupo recomputes old log-probs before each turn, but no term uses them; use objective gspo "
                "with ratio_to: old."
            )

    def updates(self, updates: Iterable[Update], services: Services) -> Iterator[Update]:
        """Replace each update by one per turn, the last turn first."""
        self._made, self._products = 0.0, (0.0, 0.0)
        for update in updates:
            yield from self._by_turn(update, services)
        # Summed over all ranks here, because a checkpoint holds the state of one rank only.
        told = services.gather(self._products)
        self._products = sum(one[0] for one in told), sum(one[1] for one in told)

    def _by_turn(self, update: Update, services: Services) -> Iterator[Update]:
        rows = update.rows
        masks, weights = [row.loss_mask for row in rows], [row.weight for row in rows]
        products = np.ones(len(rows))
        try:
            # Every rank loops over the turns of the longest episode on any rank, because all ranks update together.
            for turn in reversed(range(max(services.gather(max((_turns(row) for row in rows), default=0))))):
                parts = [_of_turn(row, mask, turn) for row, mask in zip(rows, masks, strict=True)]
                if not any(services.gather(any(part.any() for part in parts))):
                    continue
                for row, part, weight, product in zip(rows, parts, weights, products, strict=True):
                    row.loss_mask, row.weight = part, weight * float(product)
                mine = [place for place, part in enumerate(parts) if part.any()]
                chosen = tuple(rows[place] for place in mine)
                # Scored again: the updates of later turns have moved the policy since the rows were scored.
                before = self._log_probs(chosen, services)
                yield replace(update, rows=chosen, recompute=True)
                self._made += 1
                for place, old, new in zip(mine, before, self._log_probs(chosen, services), strict=True):
                    ratio = float(np.exp((new - old)[parts[place]].mean(dtype=np.float64)))
                    products[place] = self.product(products[place], ratio)
            total, count = self._products
            self._products = total + float(products.sum()), count + len(products)
        finally:
            # Also after a failed update: the step may be repeated, and metrics must see the rows as they were.
            for row, mask, weight in zip(rows, masks, weights, strict=True):
                row.loss_mask, row.weight = mask, weight

    def product(self, product: float, ratio: float) -> float:
        """M after the update of a turn whose probability ratio, new to old, is `ratio`."""
        low, high = 1 - self.settings.bound, 1 + self.settings.bound
        return float(np.clip(product * np.clip(ratio, low, high), low, high))

    @staticmethod
    def _log_probs(rows: Sequence[Row], services: Services) -> list[NDArray[np.float32]]:
        return [np.asarray(scores.sampled, np.float32) for scores in services.read(rows)]

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics turn_updates (made in the step) and turn_ratio_product (mean of M at the end of an update)."""
        total, count = self._products
        return {"turn_updates": self._made} | ({"turn_ratio_product": total / count} if count else {})

    def state_dict(self) -> dict[str, Any]:
        """Counts that `after_update` has not reported yet when a run stops in between."""
        return {"made": self._made, "products": list(self._products)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        total, count = state["products"]
        self._made, self._products = float(state["made"]), (float(total), float(count))


def _turns(row: Row) -> int:
    return max(1, len(row.turns))


def _of_turn(row: Row, mask: NDArray[np.bool_], turn: int) -> NDArray[np.bool_]:
    """[T] mask of the trained tokens of one turn; a row without turns counts as one turn."""
    if not row.turns:
        return mask if turn == 0 else np.zeros_like(mask)
    found = np.zeros_like(mask)
    if turn < len(row.turns):
        start, end = row.turns[turn]
        found[start:end] = mask[start:end]
    return found
