"""Notes which answers to a prompt agree, for advantages that weigh groups by how much their answers differ.

    class of an answer   the place of its final answer among the distinct ones of the group, in order

The verifier extracts the final answers; where it finds none, an answer has no class. The reward itself stays as it is.
Source: what modifier puzzlecraft reads (PuzzleCraft, arXiv 2512.14944, counts the distinct answers of a group).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from student.plugin.traits import Traits
from student.scoring.rewards.base import Reward, in_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices

CLASS = "answer_class"


class AnswerClasses(Reward):
    """Notes which answers to a prompt agree, and pays nothing for it (for modifier puzzlecraft)."""

    evidence = "own"
    traits = Traits(gives=("answer_classes",), least_group=2, why={"gives": "use modifier puzzlecraft"})

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Note the class of each answer; metric distinct, the share of distinct answers among those of a group."""
        answers = dict(zip(map(id, rows), services.extract(rows), strict=True))
        for group in in_groups(rows):
            distinct = sorted({answer for row in group if (answer := answers[id(row)]) is not None})
            self.fire("distinct", float(len(distinct)), float(len(group)))
            for row in group:
                row.notes.pop(CLASS, None)
                if (answer := answers[id(row)]) is not None:
                    row.notes[CLASS] = float(distinct.index(answer))
