"""FutureBridge (FTB-OPD): one turn of the teacher in an episode, kept only if the student continues better after it.

    k        the turn, not the last, with the largest mean over its tokens of log S - log T
    b        the teacher's turn in place of turn k, written after the same history (the bridge)
    share    the share of the student's tokens with log T > log S in its next `turns` turns, after turn k or after b
    kept     if the share after b is larger; b is then learnt from as one more row

The bridge shows what the teacher does at the worst turn, and the two continuations show whether it leads to where the
teacher agrees with the student. Both are played from the start, repeating the earlier actions as text. The bridge is
dropped if a continuation ends before all of its turns or its environment breaks. Continuations are not trained on.
Bridges are rows of origin expert, from which objective opd with payload hidden (exactly) or objective sft learns. The
teacher's turns come from a completion server that takes token ids, as in method sopd; a turn that it does not answer in
time is skipped.

Source: arXiv 2608.01953, abstract, and the released code by notes on it (ChenChiShui/FutureBridge-OPD; one bridge per
episode, three turns, on top of TCOD's b2f). There, the bridge is trained by a policy gradient whose ratio starts at 1
although the student did not sample it; a divergence at each of its positions needs no such assumption.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.data.plan import EpisodePlan
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe

STUDENT_ARM, TEACHER_ARM, BRIDGE = "after student", "after teacher", "bridge"
_NEED_IDS = (PayloadKind.SAMPLED, PayloadKind.GATHER)


class FutureBridgeSettings(StrategySettings):
    """Settings of FutureBridge."""

    teacher: ChatSettings = Field(
        description="Server that writes the teacher's turns: its endpoint and model, and the max_tokens of a turn."
    )
    turns: int = Field(
        3, ge=1, description="Number of the student's turns over which the two continuations are compared."
    )
    workers: int = Field(
        16, ge=1, le=256, description="Maximum number of the teacher's turns requested at the same time."
    )


class FutureBridge(Strategy[FutureBridgeSettings]):
    """Adds a turn of the teacher if the student continues better after it (FTB-OPD)."""

    evidence: ClassVar[str] = "text and code"
    traits = Traits(
        works_with_summaries=False,
        gives_rows=("all", "expert"),
        gives_log_probs=True,
        why={
            "works_with_summaries": "it replays the turns before the bridge, where no summary is made",
            "gives_rows": "add term sft",
        },
    )

    def __init__(self, settings: FutureBridgeSettings) -> None:
        super().__init__(settings)
        self._client = ChatClient(settings.teacher)

    def needs(self) -> Needs:
        """The teacher's log-probs of the sampled tokens."""
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse objectives that do not learn from bridges, or would take their tokens for the student's.

        Raises:
            ConfigError: with the term to use.
        """
        learning = [term for term in terms if term.settings.rows != "sampled"]
        for term in learning:
            kinds = {need.spec.kind for need in term.needs().signals}
            if kinds & set(_NEED_IDS):
                raise ConfigError(
                    f"term {term.settings.name!r} needs the ids that the student sampled or found likely, which "
                    "bridges do not have; set its payload to hidden or topk, or its rows to sampled with term sft "
                    "beside it."
                )

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`.

        Metrics future_bridge/asked_share and .../kept_share (of the episodes) and .../gain, the share of tokens that
        the teacher finds likelier, after the bridge less without it.
        """
        rows = sampling.score(sampling.sample(plan.rows))
        begun = [(row, one, turn) for row, one in zip(rows, plan.rows, strict=True) if (turn := worst(row)) is not None]
        with ThreadPoolExecutor(self.settings.workers) as threads:
            written = list(threads.map(lambda place: self._turn(place[0], place[2]), begun))
        places = [
            (one, sampling.said(row), turn, text) for (row, one, turn), text in zip(begun, written, strict=True) if text
        ]
        arms = [self._arms(*place) for place in places]
        # In pairs, so that rows 2 i and 2 i + 1 are the arms of one place.
        played = sampling.score(sampling.sample([arm for pair in arms for arm in pair]))
        bridges = []
        for place, own, taught in zip(places, played[::2], played[1::2], strict=True):
            shares = [self._share(own), self._share(taught)]
            if shares[0] is None or shares[1] is None:
                continue
            sampling.measure("future_bridge/gain", shares[1] - shares[0])
            if shares[1] > shares[0]:
                bridges.append(self._bridge(*place))
        sampling.measure("future_bridge/asked_share", len(places), len(rows))
        sampling.measure("future_bridge/kept_share", len(bridges), len(rows))
        return [*rows, *sampling.score(sampling.sample(bridges))]

    def _turn(self, row: Row, turn: int) -> str:
        """The teacher's turn b, or "" if the teacher did not answer."""
        try:
            return self._client.go_on(row.read_before(row.turns[turn][0]).tolist())
        except ChatFailed:
            return ""

    def _arms(self, one: PlannedRow, said: list[str], turn: int, text: str) -> tuple[PlannedRow, PlannedRow]:
        """The continuations after the student's own turn, and after the teacher's."""
        before = (*_replayed(one), *said[:turn])
        plans = [EpisodePlan(turns=self.settings.turns, replay=(*before, action)) for action in (said[turn], text)]
        own, taught = (
            replace(one, key=replace(one.key, agent=agent), episode=plan)
            for agent, plan in zip((STUDENT_ARM, TEACHER_ARM), plans, strict=True)
        )
        return own, taught

    def _bridge(self, one: PlannedRow, said: list[str], turn: int, text: str) -> PlannedRow:
        """The episode up to and including the bridge; only the bridge is learnt from."""
        before = (*_replayed(one), *said[:turn])
        plan = EpisodePlan(replay=(*before, text), given=True, passed_over=tuple(range(len(before))))
        return replace(one, key=replace(one.key, agent=BRIDGE), episode=plan)

    def _share(self, row: Row) -> float | None:
        """Share of the student's tokens with log T > log S; None if the student did not play all the turns."""
        taught = row.log_probs(TEACHER)
        if not row.trained or len(row.turns) < self.settings.turns or taught is None:
            return None
        own = row.loss_mask
        return float((taught[own] > row.behaviour_logp[own]).mean())


def worst(row: Row) -> int | None:
    """The turn k of an episode; None if no turn can be bridged."""
    taught = row.log_probs(TEACHER)
    if taught is None or not row.on_policy or not row.trained or len(row.turns) < 2:
        return None
    gaps = [float((row.behaviour_logp[a:b] - taught[a:b]).mean(dtype=np.float64)) for a, b in row.turns[:-1]]
    return int(np.argmax(gaps))


def _replayed(one: PlannedRow) -> tuple[str, ...]:
    return one.episode.replay if one.episode else ()
