"""InfoPO: a turn is worth how much its answer from the environment changes what the student does next.

    r_k   mean over the tokens of turn k + 1 of  log pi(token | real answer) - log pi(token | answer blanked out)
    r_K   the verdict's value for the last turn

What the environment answered to turn k is replaced by the text `blank` for the second reading; the action is the same,
and nothing of it enters the student's input. r_k is 0 where the environment said nothing. The rewards are by turn, for
advantages that read them (infopo, trloo, a2tgpo); the row's own reward stays the verdict. Source: arXiv 2603.00656
(abstract; a mean over the tokens and the text of the blank are ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from opd.wire.types import ScoreItem
from student.data.needs import STUDENT, Needs
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class InfoPoSettings(RewardSettings):
    """Settings of InfoPO's reward."""

    blank: str = Field("...\n", min_length=1, description="Text in place of the environment's answer.")


class InfoPo(Reward[InfoPoSettings]):
    """Rewards each turn by how much the environment's answer to it changes the next one (InfoPO)."""

    evidence = "abstract"
    by_group = False
    traits = Traits(gives=("turns",), why={"gives": "use advantage infopo or trloo"})

    def needs(self) -> Needs:
        """Verdicts, and the student, which reads its own actions again."""
        return Needs(reward="verdict", models=frozenset({STUDENT}))

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the rewards by turn of judged episodes; metric gain, nats per token of the next turn."""
        blank = np.array(services.tokenizer(self.settings.blank, add_special_tokens=False)["input_ids"], np.uint32)
        judged = [(row, value) for row in rows if (value := row.verdict_value) is not None and row.turns]
        items = [item for row, _ in judged for k in range(len(row.turns) - 1) for item in _pair(row, k, blank)]
        # One call, even with nothing to read: ranks of a sharded student must call equally often.
        means = iter([float(np.asarray(scores.sampled, np.float64).mean()) for scores in services.read(items)])
        for row, value in judged:
            gains = [next(means) - next(means) if _heard(row, k) else 0.0 for k in range(len(row.turns) - 1)]
            row.turn_rewards = (*gains, value)
            self.fire("gain", sum(gains), max(1, len(gains)))


def _heard(row: Row, turn: int) -> int:
    """The number of tokens that the environment wrote between a turn and the next one."""
    return row.turns[turn + 1][0] - row.turns[turn][1]


def _pair(row: Row, turn: int, blank: Any) -> list[ScoreItem]:
    """The next turn as a response after the real answer and after the blank; nothing without an answer."""
    start, end = row.turns[turn + 1]
    heard, before, action = _heard(row, turn), row.read_before(start), row.response_ids[start:end]
    contexts = [before, np.concatenate([before[: len(before) - heard], blank])] if heard else []
    return [ScoreItem(np.concatenate([context, action]), len(context)) for context in contexts]
