"""Base of strategies with hints: answers are sampled under another prompt than the one they are trained under.

A hinted row is sampled under `behaviour_prompt` and trained under the plain prompt. Its origin is hinted, so terms with
`rows: sampled` skip it. The papers use the loss `mixed_context`; any policy loss with `rows: all` takes the row as
off-policy. Of the hints that a strategy offers, the first that fits rollout.max_prompt_tokens is used; if none fits,
the row has no hint. Metrics hint/cut_share and hint/too_long_share count rows with a shorter hint and with none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from opd_zoo.prompts import in_template
from student.data.needs import Needs
from student.plugin.strategy import Strategy, StrategySettings_co
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.rollout.sampling import Sampling


_log = logging.getLogger(__name__)

Hint = tuple[str, Mapping[str, str]]
"""A template, in which {prompt} stands for the prompt, and what its other names stand for."""


HINTED = Traits(
    gives_rows=("all",),
    gives_log_probs=True,
    why={"gives_rows": "use objective mixed_context, which learns from hinted rows, or set rows: all in a policy loss"},
)


class Hinted(Strategy[StrategySettings_co]):
    """Base class of strategies with hints."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._warned = False

    @property
    def traits(self) -> Traits:
        return HINTED

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def hinted(self, planned: PlannedRow, hints: Iterable[Hint], sampling: Sampling) -> PlannedRow | None:
        """The row under the first of `hints` that fits, the whole hint before shorter ones; None where none does."""
        for place, hint in enumerate(hints):
            found = under_hint(planned, hint)
            if found.behaviour_prompt is None or sampling.fits(found.behaviour_prompt):
                self._tell(planned, sampling, cut=place > 0, without=False)
                return found
        self._tell(planned, sampling, cut=False, without=True)
        return None

    def _tell(self, planned: PlannedRow, sampling: Sampling, *, cut: bool, without: bool) -> None:
        sampling.measure("hint/cut_share", float(cut))
        sampling.measure("hint/too_long_share", float(without))
        if (cut or without) and not self._warned:
            self._warned = True
            _log.warning(
                "a hint of rollout.strategy %s for %s exceeds rollout.max_prompt_tokens and was %s; raise the limit "
                "(the metrics hint/cut_share and hint/too_long_share count further ones)",
                self.settings.name,
                planned.prompt.name,
                "cut" if cut else "left out",
            )


def under_hint(planned: PlannedRow, hint: Hint) -> PlannedRow:
    """The row sampled under `hint`; its tag `context` says so."""
    tags = {**planned.tags, "context": "hinted"}
    return replace(planned, behaviour_prompt=in_template(planned.prompt, hint[0], hint[1]), tags=tags)


def by_uid(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each prompt, by uid."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.key.uid, []).append(row)
    return found


def rewards_by_row(rows: Sequence[Row], sampling: Sampling) -> Mapping[tuple[str, int], float | None]:
    """The reward of every row on all ranks, by uid and sample index; every rank must call it."""
    return {(outcome.uid, outcome.sample): outcome.reward for outcome in sampling.outcomes(rows)}


def all_wrong(rewards: Sequence[float | None], threshold: float) -> bool:
    """Whether all known rewards are below the threshold, and at least one is known."""
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) < threshold
