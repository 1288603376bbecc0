"""SPO: an answer is worth the share of the other answers to its prompt that it beats.

    whole_i = mean over j != i of P(y_i beats y_j),   P = 1 for a win, 1/2 for a tie, 0 for a loss

A judge compares every two answers of a group in both orders, because judges favour a place; equal answers tie unasked.
Comparisons without a clear word are left out; an answer that none is left for has an unknown reward. No reward model is
needed, and preferences may go round in a circle: rock, paper and scissors earn the same. With n answers the judge is
asked n (n - 1) times a prompt. Source: self-play preference optimisation, arXiv 2401.04056 (by notes on it; the judge's
question is ours).
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

from pydantic import Field

from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from opd_zoo.asking import word_of
from student.plugin.traits import Traits
from student.scoring.rewards.base import in_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row

_VALUES = {"1": 1.0, "2": 0.0, "tie": 0.5}


class SpoSettings(AskedChatSettings):
    """Settings of SPO."""

    question: str = Field(
        "Question:\n{prompt}\n\nAnswer 1:\n{first}\n\nAnswer 2:\n{second}\n\nWhich answer is better? End with 1, 2 or "
        "tie.",
        description="What the judge is asked about two answers, made of {prompt}, {first}, {second} and {reference}.",
    )


class Spo(AskedChat[SpoSettings]):
    """The share of the other answers to the prompt that a judge prefers an answer to (SPO)."""

    evidence = "text"
    by_group = True
    traits = Traits(least_group=2, why={"least_group": "compares the answers of a group with each other"})

    def asked(self, rows: Sequence[Row]) -> list[float | None]:
        """The mean result of each answer against the others; metric ties, a share of the comparisons."""
        pairs = [pair for group in in_groups(rows) for pair in permutations(group, 2)]
        results: dict[int, list[float]] = {id(row): [] for row in rows}
        for (one, other), result in zip(pairs, self.told(pairs, self.result), strict=True):
            if result is not None:
                results[id(one)].append(result)
                results[id(other)].append(1.0 - result)
                self.fire("ties", float(result == 0.5))
        return [sum(mine) / len(mine) if (mine := results[id(row)]) else None for row in rows]

    def result(self, pair: tuple[Row, Row]) -> float | None:
        """P of the module's formula for the first of two answers; None if the judge gives no clear word.

        Raises:
            ChatFailed: if the judge gave no answer.
        """
        one, other = pair
        if one.text == other.text:
            return 0.5
        question = filled(self.settings.question, one.prompt, "", first=one.text, second=other.text)
        word = word_of(self.client, question, _VALUES)
        return None if word is None else _VALUES[word]
