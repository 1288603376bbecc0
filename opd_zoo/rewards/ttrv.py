"""TTRV: reinforcement learning at test time without labels: an answer earns more the more samples agree with it.

    whole_i = share(answer_i) - diversity * H / log m

share is the part of the group's votes for the answer of row i, H the entropy of all its answers in nats and m the
number of different ones; the second term is 0 for m = 1. Rows without an answer do not vote and have no reward. H is
one number for a whole group, so an advantage that subtracts the group's mean cancels it: such a recipe is refused, and
with `diversity: 0` only the majority counts. Advantages `signed` and `drpo` subtract no mean: there H moves a group's
answers across their threshold. Source: the code of arXiv 2510.06783, Akshit21112002/TTRV.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from opd.errors import ConfigError
from student.data.needs import Needs
from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, RewardSettings, in_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class TtrvSettings(RewardSettings):
    """Settings of TTRV."""

    diversity: float = Field(0.75, ge=0, description="Weight of the entropy of a group's answers, which is subtracted.")


class Ttrv(Reward[TtrvSettings]):
    """The share of samples that agree with an answer, without labels (TTRV)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "text and code"
    traits = Traits(least_group=2, why={"least_group": "lets the answers to a prompt vote"})

    def needs(self) -> Needs:
        """No labels or verdicts: the answers vote."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse groups of one, and an entropy term that an advantage would cancel.

        Raises:
            ConfigError: for rollout.samples_per_prompt of 1, or an advantage that subtracts a group's mean.
        """
        for term in terms:
            chain = getattr(term, "chain", None)
            if not self.settings.diversity or chain is None or chain.traits.sees_threshold:
                continue
            if chain.shift_free == "group":
                raise ConfigError(
                    "the entropy in reward ttrv is the same for a whole group, so advantage "
                    f"{chain.first.settings.name!r} of term {term.settings.name!r} cancels it; set diversity to 0, or "
                    "use an advantage without a group's mean, for example reinforce_pp."
                )

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; metric majority_share, the votes of the commonest answer."""
        answers = dict(zip(map(id, rows), services.extract(rows), strict=True))
        for group in in_groups(rows):
            votes = Counter(answer for row in group if (answer := answers[id(row)]) is not None)
            total = votes.total()
            entropy = -math.fsum(n / total * math.log(n / total) for n in votes.values())
            spread = entropy / math.log(len(votes)) if len(votes) > 1 else 0.0
            for row in group:
                answer = answers[id(row)]
                row.reward = None if answer is None else votes[answer] / total - self.settings.diversity * spread
            if votes:
                self.fire("majority_share", votes.most_common(1)[0][1] / total)
