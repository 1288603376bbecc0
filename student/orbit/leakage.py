"""Leakage between modes: how close the student in one mode is to the teachers of the others.

    leakage[i, j] = KL( S(. | q, mark of i) || T_j(. | q, mark of j) )   on answers of the student in mode i

in nats per token. Every teacher reads the problem with the mark that it was trained with. Where the student
distinguishes the modes, the diagonal is the smallest of its row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opd.tasks.encode import encode_prompt
from opd.tasks.modes import ModeSettings, mode_of
from student.data.row import Row
from student.evaluate import EvalMeasure
from student.learning.learner import Learner
from student.orbit.figures import asked_in
from student.scoring.needs import TEACHER
from student.scoring.score import Scorer


def leakage(
    rows: Sequence[Row],
    modes: Mapping[str, ModeSettings],
    problems: int,
    *,
    scorer: Scorer,
    measure: EvalMeasure,
    learner: Learner,
    tokenizer: Any,
    poll: Callable[[], None],
) -> dict[str, float]:
    """leakage/I/J for every pair of trained modes; every rank must ask.

    Args:
        rows: answers at the temperature of the rollouts, in all modes.
        modes: by name.
        problems: answers of each mode that are scored.
        scorer: asks the teachers for what `measure` needs.
        measure: the divergence.
        learner: the student.
        tokenizer: the student's.
        poll: called while waiting.
    """
    found = {}
    modes = {name: mode for name, mode in modes.items() if mode.weight}
    for name in modes:
        mine = [row for row in rows if mode_of(row.prompt) == name][:problems]
        for other, mode in modes.items():
            asked = [asked_in(row, other, mode) for row in mine]
            # As a context of the teacher: the row keeps the prompt that the student answered.
            for row in asked:
                row.contexts[TEACHER] = np.array(encode_prompt(row.prompt, tokenizer), dtype=np.uint32)

            def score(asked: Sequence[Row] = asked) -> None:
                for row in asked:
                    scorer.submit(row)
                scorer.collect(asked, poll=poll)

            learner.ranks.agree(score)
            if asked:
                total, tokens = measure.measure(learner, asked)
                found[f"leakage/{name}/{other}"] = total / max(1.0, tokens)
    return found
