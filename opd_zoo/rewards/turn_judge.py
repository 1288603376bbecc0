"""MAPO's process rewards: a judge grades each turn of an episode.

    r_k = weight grade_k            for every turn but the last
    r_K = weight grade_K + verdict  for the last one

grade_k, from 0 to 1, is the last number of the judge's answer over `best`. The judge reads the episode up to turn k and
what the environment answered. The rewards are by turn, for advantages that read them (mapo, trloo); the row's own
reward stays the verdict. If one turn of an episode cannot be graded, its rewards by turn are unknown, and its verdict
counts at its last turn. Source: MAPO, arXiv 2603.06194 (inferred from its abstract: dense process feedback of a judge;
the question, the scale and the weight are ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd.tasks.judges import ChatScorer, GraderSettings
from opd_zoo.turns import with_answer
from student.plugin.traits import Traits
from student.rl.rewards.asked import Asked, AskedSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices


class TurnJudgeSettings(AskedSettings, GraderSettings):
    """Settings of the judge of turns."""

    adds: Literal[True] = Field(True, description="Always true: the verdict counts at the last turn.")
    question: str = Field(
        "An agent acts in an environment, turn by turn. This is the episode so far; the last turn of the agent and "
        "what the environment answered stand at its end.\n\n{answer}\n\nGrade the last turn from 0 to 10: how much "
        "does it help to solve the task? End with the grade alone.",
        description="Question to the judge, in which {answer} is replaced by the episode up to the judged turn, and "
        "{prompt} and {reference} by those texts. The last number of its reply is the grade.",
    )


class TurnJudge(Asked[TurnJudgeSettings]):
    """Rewards each turn by the grade that a judge gives it (MAPO)."""

    evidence = "inferred"
    traits = Traits(gives=("turns",), why={"gives": "use advantage mapo or trloo"})

    def __init__(self, settings: TurnJudgeSettings) -> None:
        super().__init__(settings)
        self.client = ChatScorer(settings)

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the rewards by turn; metrics grade (of a turn) and unknown (share of the turns)."""
        judged = [(row, value) for row in rows if (value := row.verdict_value) is not None and row.turns]
        # Decoded here and not in the threads, because a fast tokenizer must not be used by two threads at once.
        turns = [(row.prompt, _text(row, k, services.tokenizer)) for row, _ in judged for k in range(len(row.turns))]
        grades = iter(self.told(turns, self.grade))
        for row, value in judged:
            mine = [next(grades) for _ in row.turns]
            clear = [self.settings.weight * grade for grade in mine if grade is not None]
            self.fire("unknown", float(len(mine) - len(clear)), float(len(mine)))
            if len(clear) == len(mine):
                self.fire("grade", sum(grade for grade in mine if grade is not None), float(len(mine)))
                row.turn_rewards = (*clear[:-1], clear[-1] + value)

    def grade(self, turn: tuple[Prompt, str]) -> float | None:
        """The grade of a turn, 0 to 1, from its prompt and the episode up to it; None if the judge gives no number.

        Raises:
            ChatFailed: if the judge gave no answer.
        """
        return self.client.score(*turn)


def _text(row: Row, turn: int, tokenizer: Any) -> str:
    return str(tokenizer.decode(with_answer(row, turn).tolist(), skip_special_tokens=True))
