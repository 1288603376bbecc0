"""Dr. MAS (arXiv 2602.08847): the turns of each agent in an episode are compared with that agent's turns alone.

    A_ik   (R_i - mean_a R) / (std_a R + 1e-6),   a the agent that acted in turn k

The mean and deviation of agent a are over all its turns in the episodes of the prompt, each turn a sample with its
episode's reward; one mean for all agents would treat those with other rewards or numbers of turns unfairly. A single
sample keeps R. The environment says who acts next (`Observation.info["agent"]`). Where agents have rows of their own,
`group: [uid, agent]` of any estimator does the same. Evidence: text and code (langfengQ/DrMAS, read).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from opd_zoo.advantages.turns import normalised, spread
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome


class DrMas(Advantage[AdvantageSettings]):
    """Reward normalised over the rows of the same agent (Dr. MAS).

    Metric agents, the mean number of agents per prompt.
    """

    evidence = "text and code"
    traits = Traits(shift_free="group", scale_free="group", reads=("turns",))

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """Credit per token of each episode, by the module's formula."""
        found = [np.zeros(max(1, len(outcome.turns.spans))) for outcome in outcomes]
        agents = 0
        groups = self.groups(outcomes)
        for places in groups:
            samples: dict[str, list[tuple[int, int]]] = {}
            for place in places:
                who = outcomes[place].turns.agents or (outcomes[place].agent,) * len(found[place])
                for turn in range(len(found[place])):
                    samples.setdefault(who[turn], []).append((place, turn))
            agents += len(samples)
            for mine in samples.values():
                rewards = [known(outcomes[place]) for place, _ in mine]
                for (place, turn), value in zip(mine, normalised(rewards, scale=True), strict=True):
                    found[place][turn] = value if len(mine) > 1 else rewards[0]
        self.fired = {"agents": (agents, len(groups))}
        return [spread(outcome, value) for outcome, value in zip(outcomes, found, strict=True)]
