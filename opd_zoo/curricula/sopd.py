"""SOPD (arXiv 2608.16333): at the start of each of its turns, the student learns the whole turn of the teacher.

    h_k    the history before the student's turn k, its own turns and mistakes included
    s~_k   the teacher's turn given h_k, written greedily
    L      mean over turns of the mean over tokens of -log S(s~_k,t | h_k, s~_k,<t)

The student's episodes determine where to learn; the teacher's turns are what is learnt. Turns do not depend on each
other, so all are requested at once, and no log-probs are sent. With one turn per episode this is supervised
fine-tuning. The teacher is a completion server that takes token ids (`teacher.endpoint`: vLLM, SGLang), because teacher
servers score but do not generate; it must have the student's tokenizer. Its turns become rows of origin expert: use
objective sft with aggregation sequence_mean and rows expert. A turn that does not arrive in time is left out and
counted.
Known from two notes on the paper that agree (no code was found): the rule, greedy turns of up to 512 tokens, learning
rate 1e-6, 64 rows a step. Evidence: text at second hand.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.stops import answer_end
from student.data.row import Row, RowKey
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from student.plugin.controllers import Services


class SopdSettings(ControllerSettings):
    """Settings of the teacher's turns."""

    teacher: ChatSettings = Field(
        description="Server that writes the teacher's turns: its endpoint and model, and the max_tokens of a turn."
    )
    workers: int = Field(
        16, ge=1, le=256, description="Maximum number of the teacher's turns requested at the same time."
    )
    trained_under: int = Field(
        0,
        ge=0,
        description="Learn a turn only if the history before it has at most this many tokens; 0 learns all turns "
        "that fit the student's length limit.",
    )


class Sopd(Controller[SopdSettings]):
    """Teaches the teacher's whole turn at the start of each turn of the student (SOPD)."""

    traits = Traits(
        works_ahead=True, gives_rows=("all", "expert"), gives_scored="none", why={"gives_rows": "add term sft"}
    )

    def __init__(self, settings: SopdSettings) -> None:
        super().__init__(settings)
        self._client = ChatClient(settings.teacher)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Add the teacher's turns."""
        places = [(row, turn) for row in rows if row.on_policy and row.trained for turn in range(len(row.turns))]
        longest = self.settings.trained_under
        histories = [row.read_before(row.turns[k][0]) for row, k in places]
        if longest:
            kept = [i for i, history in enumerate(histories) if len(history) <= longest]
            places, histories = [places[i] for i in kept], [histories[i] for i in kept]
        with ThreadPoolExecutor(self.settings.workers) as threads:
            texts = list(threads.map(self._written, histories))
        # Encoded here and not in the threads, because a fast tokenizer must not be used by two threads at once.
        turns = [
            self._turn(row, k, history, text)
            for (row, k), history, text in zip(places, histories, texts, strict=True)
            if text is not None
        ]
        for row in rows:
            row.notes["teacher_asked"] = float(sum(one is row for one, _ in places))
        return [*rows, *(turn for turn in turns if turn is not None)]

    def _written(self, history: NDArray[np.uint32]) -> str | None:
        """The teacher's turn as text; None if it did not arrive in time."""
        try:
            return self._client.go_on(history.tolist())
        except ChatFailed:
            return None

    def _turn(self, row: Row, turn: int, history: NDArray[np.uint32], text: str) -> Row | None:
        """The teacher's turn as a row of its own; None for an empty turn."""
        ids = [int(i) for i in self.services.tokenizer(text, add_special_tokens=False)["input_ids"]]
        own = self.services.tokenizer.eos_token_id
        end = answer_end(row.prompt, self.services.tokenizer, frozenset() if own is None else frozenset({int(own)}))
        # A turn that fills its limit was cut; an end token there would teach the student to stop mid-sentence.
        if end is not None and ids[-1:] != [end] and len(ids) < self.settings.teacher.max_tokens:
            ids.append(end)
        if not ids:
            return None
        return Row(
            key=RowKey(row.key.step, row.key.uid, row.key.sample, turn, "teacher"),
            prompt=row.prompt,
            prompt_ids=history,
            response_ids=np.array(ids, np.uint32),
            behaviour_logp=np.full(len(ids), np.nan, np.float32),
            policy_version=row.policy_version[:1].repeat(len(ids)),
            loss_mask=np.ones(len(ids), np.bool_),
            truncated=False,
            text=text,
            origin="expert",
            turns=((0, len(ids)),),
            tags={key: value for key, value in row.tags.items() if key != "ended"},
        )

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics teacher_turns (rows of the teacher), teacher_turn_tokens, and teacher_unanswered (share of turns)."""
        given = [outcome for outcome in services.outcomes if outcome.agent == "teacher"]
        asked = sum(outcome.notes.get("teacher_asked", 0.0) for outcome in services.outcomes)
        return {
            "teacher_turns": float(len(given)),
            "teacher_turn_tokens": float(sum(outcome.tokens for outcome in given)),
            "teacher_unanswered": 1.0 - len(given) / asked if asked else 0.0,
        }
