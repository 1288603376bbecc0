"""EVOLvE's bandits: explore and exploit arms whose pay is unknown; the known path is that of UCB.

Each arm pays 1 with a chance of its own, which the student is not told, and otherwise 0. A turn names an arm by its
letter; what makes no sense pays nothing and costs a turn. The reward of a turn is its pay over the number of turns, so
that rewards add up to the mean pay, and an episode succeeds if the arm of the highest chance was pulled at least half
of the time. How often the n-th pull of an arm pays is part of the problem, so equal actions have equal results.

The path pulls every arm once, then the arm with the largest mean + explore sqrt(log t / n): give it to the student by
expert_rows with `source: path`, or to a teacher. Source: EVOLvE, arXiv 2410.06238 (abstract: bandits in words, and
algorithms for exploration as demonstrations); the words and sizes are ours.
"""

import math
import string
from random import Random
from typing import ClassVar

from pydantic import Field

from opd.config import Settings
from opd.tasks.environments.base import EnvironmentTask, Observation
from opd.tasks.prompt import Prompt


class BanditOptions(Settings):
    """Size of the bandit."""

    arms: int = Field(3, ge=2, le=26, description="Number of arms.")
    turns: int = Field(12, ge=2, le=200, description="Number of pulls of an episode.")
    gap: float = Field(
        0.3, ge=0, lt=1, description="How far the chance of the best arm is above that of every other, at least."
    )
    explore: float = Field(1.0, ge=0, description="Weight of the exploration in the known path.")
    words: str = Field(
        "You pulled {arm} and got {pay}.\n",
        description="What the student reads after a pull, made of {arm} and {pay}.",
    )


class Bandit(EnvironmentTask):
    """Arms of unknown pay, with the path of UCB (EVOLvE)."""

    Options: ClassVar[type[Settings]] = BanditOptions
    name = "bandit"

    def draw(self, random: Random) -> Prompt:
        """Draw the arms and what each of their pulls pays."""
        o = self.options
        best = random.uniform(o.gap, 1.0)
        chances = [random.uniform(0.0, best - o.gap) for _ in range(o.arms)]
        chances[random.randrange(o.arms)] = best
        pays = ["".join(str(int(random.random() < chance)) for _ in range(o.turns)) for chance in chances]
        letters = string.ascii_uppercase[: o.arms]
        number = random.randrange(1_000_000)  # makes problems distinct, because identity depends on the text
        text = f"Game {number}. Arms: {', '.join(letters)}. Pull the arm that pays most, {o.turns} times. Name one.\n"
        path = [letters[arm] for arm in ucb(pays, o.turns, o.explore)]
        return self.make_prompt(text, path, pays=pays, best=letters[chances.index(best)])

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode."""
        self._pays: list[str] = prompt.extra["pays"]
        self._best: str = prompt.extra["best"]
        self._pulled: list[str] = []
        return Observation("")

    def step(self, action: str) -> Observation:
        """Pull an arm."""
        arm = action.strip()[:1].upper()
        place = string.ascii_uppercase.find(arm) if arm else -1
        known = 0 <= place < len(self._pays)
        pay = int(self._pays[place][self._pulled.count(arm)]) if known else 0
        self._pulled.append(arm if known else "")
        done = len(self._pulled) == self.options.turns
        words = self.options.words.replace("{arm}", arm if known else "nothing").replace("{pay}", str(pay))
        return Observation(
            "" if done else words,
            reward=pay / self.options.turns,
            done=done,
            success=2 * self._pulled.count(self._best) >= self.options.turns if done else None,
            info={"best_share": self._pulled.count(self._best) / len(self._pulled), "measures": {"pay": float(pay)}},
        )


def ucb(pays: list[str], turns: int, explore: float) -> list[int]:
    """The arms that UCB pulls; ties go to the earlier arm."""
    counts, sums, pulled = [0] * len(pays), [0] * len(pays), []
    for turn in range(turns):
        fresh = [arm for arm, count in enumerate(counts) if not count]
        scores = [
            s / n + explore * math.sqrt(math.log(turn) / n) if n else 0.0 for s, n in zip(sums, counts, strict=True)
        ]
        arm = fresh[0] if fresh else max(range(len(pays)), key=lambda i: (scores[i], -i))
        sums[arm] += int(pays[arm][counts[arm]])
        counts[arm] += 1
        pulled.append(arm)
    return pulled
