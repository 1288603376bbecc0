"""SAGE-OPD's judgements (arXiv 2606.19659): a chat model that sees the outcome of a turn says whether to learn from it.

    i_k   0 for Skip, `weak` for Weak, 1 for Strong and for any other answer
    c_k   the mean over the tokens of turn k of the teacher's largest probability
    w_k   i_k c_k, the weight of the turn in objective `sage_opd`

The judge reads what the student had read before turn k, the turn, and the environment's answer. What it says never
enters the student's input. It is called through an OpenAI-compatible endpoint; answers are cached by content, so that a
step that is taken again gets the same ones. A turn for which no answer can be had has i_k = 1, and is counted. Known
from two readers of the paper: the form of w_k, the three words, full reverse KL. The judge's prompt was not found and
is ours; `weak` 0.5 is that of a re-implementation. Evidence: text at second hand.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.wire.types import PayloadKind
from opd_zoo.turns import with_answer
from student.data.needs import TEACHER
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services

NOTE = "turn_weight/"
"""Prefix of a row's notes: `turn_weight/k` is w_k before it is divided by its mean."""

_QUESTION = """An agent acts in an environment, turn by turn. This is the episode so far; the last turn of the agent and
what the environment answered stand at its end.

{history}

Should the agent be taught what a better agent would have done in its last turn? Answer with one word: Skip where the
turn was fine or nothing can be learnt from it, Weak where it could have been better, Strong where it was a mistake."""


class SageSettings(ControllerSettings):
    """Settings of the judgements."""

    judge: ChatSettings = Field(description="Chat model that judges turns: its endpoint and model.")
    weak: float = Field(
        0.5, ge=0, le=1, description="Factor of the weight of a turn that is judged Weak; Skip has 0 and Strong 1."
    )
    question: str = Field(
        _QUESTION, description="What the judge is asked; {history} is replaced by the episode up to the judged turn."
    )
    workers: int = Field(16, ge=1, le=256, description="Maximum number of turns judged at the same time.")


class Sage(Controller[SageSettings]):
    """Lets a judge decide which turns to learn from (SAGE-OPD)."""

    traits = Traits(works_ahead=True, gives=("turn_weights",), why={"gives": "use objective sage_opd"})

    def __init__(self, settings: SageSettings) -> None:
        super().__init__(settings)
        self._client = ChatClient(settings.judge)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Note w_k for each turn of each row; a row without turns counts as one turn."""
        places = [
            (row, k, turn) for row in rows if row.trained for k, turn in enumerate(row.turns or ((0, row.length),))
        ]
        with ThreadPoolExecutor(self.settings.workers) as threads:
            judged = list(threads.map(lambda place: self._judge(place[0], place[1]), places))
        for (row, k, (start, end)), (weight, heard) in zip(places, judged, strict=True):
            row.notes[f"{NOTE}{k}"] = weight * confidence(row, start, end)
            row.notes["turns_judged"] = row.notes.get("turns_judged", 0.0) + heard
            row.notes["turns_skipped"] = row.notes.get("turns_skipped", 0.0) + (weight == 0.0)
        return rows

    def _judge(self, row: Row, turn: int) -> tuple[float, bool]:
        """i_k, and whether it came from the judge."""
        history = str(self.services.tokenizer.decode(with_answer(row, turn).tolist(), skip_special_tokens=True))
        try:
            said = self._client.ask([{"role": "user", "content": self.settings.question.replace("{history}", history)}])
        except ChatFailed:
            return 1.0, False
        words = {"skip": 0.0, "weak": self.settings.weak, "strong": 1.0}
        word = said.strip().split()[0].strip(".,:!*").lower() if said.strip() else ""
        return words.get(word, 1.0), word in words

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics turns_skipped (share of turns judged Skip) and turns_judged (share of turns judged at all)."""
        told = [outcome.notes for outcome in services.outcomes if "turns_judged" in outcome.notes]
        turns = sum(sum(name.startswith(NOTE) for name in notes) for notes in told)
        return {name: sum(notes[name] for notes in told) / max(1, turns) for name in ("turns_skipped", "turns_judged")}


def confidence(row: Row, start: int, end: int) -> float:
    """c: the teacher's largest probability, averaged over positions `start` to `end`.

    Raises:
        ConfigError: if the row has no top-k payload of the teacher.
    """
    scores = row.signals.get((TEACHER, PayloadKind.TOPK))
    if scores is None or scores.values is None:
        raise ConfigError(
            "method sage needs the probability of the teacher's most likely token; use objective sage_opd, whose "
            "payload topk has it."
        )
    return float(np.exp(np.asarray(scores.values[start:end], np.float64).max(-1)).mean())
