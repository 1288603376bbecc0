"""Dr. MAS (arXiv 2602.08847): each agent of an episode is compared with itself alone.

    A_ik   (R_i - mean_a R) / (std_a R + 1e-6),   a the agent that acted in turn k

Means and deviations of agent a are over all its turns in the episodes of the prompt, each turn a sample with its
episode's reward; one mean for all agents would weigh those with other rewards or other numbers of turns unevenly. A
single sample keeps R. Who acts next is what the environment says (`Observation.info["agent"]`). Where agents have rows
of their own, `group: [uid, agent]` of any estimator does the same. Evidence: text and code (langfengQ/DrMAS, read).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known
from student.rl.advantages.turns import normalised, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class DrMas(Advantage):
    """The estimator; see the module. Metric agents: of a prompt's episodes, mean."""

    settings_type = AdvantageSettings
    evidence = "text and code"
    reads_turns: ClassVar[bool] = True
    shift_free = scale_free = "group"  # but for samples that stand alone, which keep their reward

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """See the module."""
        found = [np.zeros(max(1, len(outcome.spans))) for outcome in outcomes]
        agents = 0
        groups = self.groups(outcomes)
        for places in groups:
            samples: dict[str, list[tuple[int, int]]] = {}
            for place in places:
                who = outcomes[place].turn_agents or (outcomes[place].agent,) * len(found[place])
                for turn in range(len(found[place])):
                    samples.setdefault(who[turn], []).append((place, turn))
            agents += len(samples)
            for mine in samples.values():
                rewards = [known(outcomes[place]) for place, _ in mine]
                for (place, turn), value in zip(mine, normalised(rewards, scale=True), strict=True):
                    found[place][turn] = value if len(mine) > 1 else rewards[0]
        self.fired = {"agents": (agents, len(groups))}
        return [spread(outcome, value) for outcome, value in zip(outcomes, found, strict=True)]
