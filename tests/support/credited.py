"""The credit of groups of rewards under a chain of advantages."""

from typing import Any

from student.data.needs import REFERENCE
from student.data.outcome import Outcome
from student.rl.advantages.chain import AdvantageChain


def credit(*groups: list[float], gaps: list[float] | None = None, chain: list[Any] | None = None, **entry: Any) -> Any:
    rows = []
    for g, rewards in enumerate(groups):
        for i, reward in enumerate(rewards):
            gap = 0.0 if gaps is None else gaps[i]
            rows.append(Outcome(0, f"p{g}", i, reward=reward, tokens=2, sums={"behaviour": gap, REFERENCE: 0.0}))
    return AdvantageChain(chain or [entry], "a test").estimate(rows)
