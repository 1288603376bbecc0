"""MatchTIR (arXiv 2601.10712): each turn is rewarded for the reference calls that its own tool calls match.

    S_ij    [names agree] (1 + J(parameter names) + equal values) / (2 + |parameters of the reference|)
    hard    r(call i) = S_ij of the one reference call j that it is assigned, the sum of all S as large as can be;
            `miss` where it is assigned none
    soft    r(call i) = sum_j T_ij S_ij, T the plan of transport with entropy 0.1, cost -S and uniform margins
    r_k     the mean over the calls of turn k, 0 without calls; the last turn is paid the verdict's value

J is the Jaccard index. Reference calls are in the prompt's column `calls`, as for `toolrl`. The rewards are by turn,
for advantages that read them (`matchtir`, `trloo`, `gigpo`); the row's own reward stays the verdict. The released code
assigns greedily, best pair first, and calls it optimal assignment; here the assignment is optimal. Evidence: text and
code (quchangle1/MatchTIR).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.tasks.tools import Call, parse_reply
from opd_zoo.rewards.toolrl import jaccard, reference_calls, same_value
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class MatchTirSettings(RewardSettings):
    """Settings of MatchTIR's reward."""

    column: str = Field("calls", description="Kept column with the prompt's reference calls (prompts.keep_columns).")
    assignment: Literal["hard", "soft"] = Field(
        "hard", description="hard: each call matches at most one reference call; soft: it shares in all of them."
    )
    miss: float = Field(0.0, ge=-1, le=0, description="With hard assignment: reward of a call without a match.")
    entropy: float = Field(0.1, gt=0, description="With soft assignment: strength of the entropic regularisation.")


class MatchTir(Reward[MatchTirSettings]):
    """Rewards each turn by how well its tool calls match reference calls (MatchTIR)."""

    evidence = "text and code"
    by_group = False
    traits = Traits(gives=("turns",), why={"gives": "use advantage matchtir or trloo"})

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the rewards by turn; metrics matched (mean reward of a call) and calls (mean number per episode).

        Raises:
            DataError: for reference calls that are not valid.
        """
        for row in rows:
            wanted, value = reference_calls(row, self.settings.column), row.verdict_value
            if wanted is None or value is None or not row.turns:
                continue
            texts = [services.tokenizer.decode(row.response_ids[a:b].tolist()) for a, b in row.turns]
            by_turn = [[one for one in parse_reply(text).calls if isinstance(one, Call)] for text in texts]
            every = [one for calls in by_turn for one in calls]
            paid = self.paid(similarity(wanted, every))
            each = iter(paid)
            rewards = [float(np.mean([next(each) for _ in calls])) if calls else 0.0 for calls in by_turn]
            row.turn_rewards = (*rewards[:-1], value)
            self.fire("calls", len(every))
            for one in paid:
                self.fire("matched", one)

    def paid(self, scores: NDArray[np.float64]) -> list[float]:
        """The reward of each call, from S [calls, references]."""
        from scipy.optimize import linear_sum_assignment

        if not scores.size:
            return [self.settings.miss if self.settings.assignment == "hard" else 0.0] * len(scores)
        if self.settings.assignment == "soft":
            found: list[float] = (transport(scores, self.settings.entropy) * scores).sum(1).tolist()
            return found
        rewards = [self.settings.miss] * len(scores)
        for i, j in zip(*linear_sum_assignment(-scores), strict=True):
            rewards[i] = float(scores[i, j]) or self.settings.miss
        return rewards


def similarity(reference: Sequence[Call], calls: Sequence[Call]) -> NDArray[np.float64]:
    """S of the module's formula, [calls, references], in [0, 1]."""
    found = np.zeros((len(calls), len(reference)))
    for i, call in enumerate(calls):
        for j, wanted in enumerate(reference):
            if call.name == wanted.name:
                equal = sum(
                    name in call.arguments and same_value(value, call.arguments[name], call.coerced)
                    for name, value in wanted.arguments.items()
                )
                names = jaccard(list(wanted.arguments), list(call.arguments))
                found[i, j] = (1 + names + equal) / (2 + len(wanted.arguments))
    return found


def transport(scores: NDArray[np.float64], entropy: float, rounds: int = 200) -> NDArray[np.float64]:
    """[m, n] transport plan with cost -scores and uniform margins 1/m, 1/n (Sinkhorn in log space)."""
    m, n = scores.shape
    # In log space, because exp(score / entropy) overflows for a small entropy.
    kernel = scores / entropy
    rows, columns = np.zeros(m), np.zeros(n)
    for _ in range(rounds):
        rows = -np.log(m) - np.logaddexp.reduce(kernel + columns, axis=1)
        columns = -np.log(n) - np.logaddexp.reduce(kernel + rows[:, None], axis=0)
    plan: NDArray[np.float64] = np.exp(kernel + rows[:, None] + columns)
    return plan
