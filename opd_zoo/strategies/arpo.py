"""ARPO: episodes branch where the student became uncertain after an answer of the environment.

    H_k      mean entropy of the first `tokens` tokens of turn k over the student's `width` most likely ids, nats
    q_k      clip(u - w (H_k - H_0), 0, 1),   u uniform in (0, 1)
    branch   if q_k <= p, another episode begins with turns 0 .. k - 1, with the same ids and answers

Of n planned episodes, the share `share` is played from the start. Then turns are considered in order, the early turns
of all episodes first and branches of branches in the next round, until there are n episodes or `rounds` rounds are
over; any that are left are played from the start. A branch also learns from its shared beginning: in a group's loss,
shared tokens have the sum of the credits of all episodes through them (the paper's soft form). The hard form gives each
of those m episodes the mean credit there, m times the same token at the same ratio, which is the same sum. Both forms
have the same gradient as long as no ratio is clipped, so only one is implemented. If the environment answers a repeated
action differently, the branch ends as broken. Actions that a method replayed before an episode are replayed before its
branches; given episodes are played unchanged. Source: arXiv 2507.19849, by notes on its code (dongguanting/ARPO; n 16,
half from the start, p 0.5, 20 tokens, 10 ids). Its scripts have w 0.2 for entropies divided by log V, which is 0.0168
per nat for a vocabulary of 151936 ids: a rise of one nat makes a branch 1.7 percentage points more likely. There, an
episode branches while it is played; here after the round, from the same turns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from opd.wire.types import PayloadSpec
from opd_zoo.strategies.entropies import entropies
from opd_zoo.strategies.hinted import by_uid
from student.data.needs import STUDENT, Needs, SignalNeed
from student.data.plan import Branch, EpisodePlan
from student.data.streams import stream
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row, RowKey
    from student.rollout.sampling import Sampling


class ArpoSettings(StrategySettings):
    """Settings of ARPO."""

    share: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="Share of a group's episodes that are played from the start; the others branch off.",
    )
    gain: float = Field(
        0.0168, ge=0, description="w, the rise in the probability of a branch per nat of entropy above that of turn 0."
    )
    probability: float = Field(
        0.5, ge=0, le=1, description="p, the probability of a branch at a turn whose entropy equals that of turn 0."
    )
    tokens: int = Field(
        20, ge=1, description="Number of tokens at the start of a turn over which its entropy is averaged."
    )
    width: int = Field(10, ge=2, le=4096, description="Number of most likely ids over which the entropy is computed.")
    rounds: int = Field(
        2, ge=1, description="Maximum number of rounds of branches; from the second on, branches branch too."
    )
    seed: int = Field(0, ge=0, description="Seed of the random numbers u.")


class Arpo(Strategy[ArpoSettings]):
    """Branches episodes at turns whose entropy rose (ARPO)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        works_with_summaries=False,
        least_group=2,
        why={
            "works_ahead": "it plays only part of the planned episodes from the start and branches the others",
            "works_with_summaries": "it repeats the turns before a branch in the environment, where no summary is made",
            "least_group": "branches the episodes of a group",
        },
    )

    def needs(self) -> Needs:
        """The student's log-probs at its most likely ids."""
        gathered = PayloadSpec.gather(self.settings.width)
        return Needs(signals=(SignalNeed(STUDENT, gathered),), candidates=self.settings.width)

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics arpo/branched_share (of the episodes), arpo/rise and arpo/diverged_share."""
        open_: dict[str, list[PlannedRow]] = {row.key.uid: [] for row in plan.rows}
        first: list[PlannedRow] = []
        for row in plan.rows:
            given = row.episode is not None and row.episode.given
            (first if given else open_[row.key.uid]).append(row)
        first += [row for slots in open_.values() for row in self._take(slots, self._from_start(len(slots)))]
        rows = newest = sampling.score(sampling.sample(first))
        begun = {row.key: row.episode or EpisodePlan() for row in first}
        for _ in range(self.settings.rounds):
            branches = list(self._branches(newest, open_, begun, sampling))
            if not sampling.any(bool(branches)):
                break
            newest = sampling.score(sampling.sample(branches))
            begun |= {row.key: row.episode for row in branches if row.episode}
            rows = [*rows, *newest]
        rows = [*rows, *sampling.score(sampling.sample([row for slots in open_.values() for row in slots]))]
        branched = [row for row in rows if row.origin == "branch"]
        sampling.measure("arpo/branched_share", len(branched), len(rows))
        sampling.measure("arpo/diverged_share", sum("diverged" in row.tags["ended"] for row in branched), len(branched))
        # The key of a branch names its parent, which was not known when the row was planned.
        order = {row.key: place for place, row in enumerate(plan.rows)}
        return sorted(rows, key=lambda row: order[replace(row.key, parent=-1)])

    def _from_start(self, count: int) -> int:
        return max(1, round(self.settings.share * count))

    @staticmethod
    def _take(slots: list[PlannedRow], count: int) -> list[PlannedRow]:
        """Remove the first `count` slots from the open ones, and return them."""
        taken = slots[:count]
        del slots[:count]
        return taken

    def _branches(
        self,
        rows: Sequence[Row],
        open_: dict[str, list[PlannedRow]],
        begun: dict[RowKey, EpisodePlan],
        sampling: Sampling,
    ) -> Iterator[PlannedRow]:
        for uid, mine in by_uid(rows).items():
            # A branch's own turns start with the one at which it branched, which has already been considered.
            able = [row for row in mine if row.trained and row.on_policy and len(row.turns) > 1]
            places = [(turn, row) for row in able for turn in range(_own(row) + 1, len(row.turns))]
            for turn, row in sorted(places, key=lambda place: (place[0], place[1].key.sample)):
                rise = self.entropy(row, turn) - self.entropy(row, 0)
                sampling.measure("arpo/rise", rise)
                if open_[uid] and self.branches(row, turn, rise):
                    (slot,) = self._take(open_[uid], 1)
                    yield replace(
                        slot,
                        key=replace(slot.key, parent=row.key.sample),
                        episode=replace(begun[row.key], branch=Branch(row, turn)),
                    )

    def branches(self, row: Row, turn: int, rise: float) -> bool:
        """Decide whether another episode branches at a turn whose entropy is `rise` nats above that of turn 0."""
        s, key = self.settings, row.key
        u = float(stream(s.seed, "arpo", key.step, key.uid, key.sample, turn).random())
        return min(1.0, max(0.0, u - s.gain * rise)) <= s.probability

    def entropy(self, row: Row, turn: int) -> float:
        """The entropy H of a turn, nats.

        Raises:
            ConfigError: if the row has no log-probs of the student.
        """
        start, end = row.turns[turn]
        tokens = slice(start, min(end, start + self.settings.tokens))
        return float(entropies(row, self.settings.width, "arpo", tokens).mean())


def _own(row: Row) -> int:
    """The first turn of an episode that it does not share with its parent."""
    return int(row.notes.get("branched", 0.0))
