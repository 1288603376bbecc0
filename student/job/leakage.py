"""Leakage between modes: the divergence of the student in one mode from the teachers of all modes.

    leakage[i, j] = KL( S(. | q, mark of i) || T_j(. | q, mark of j) )   on answers of the student in mode i

in nats per token. Every teacher reads the problem with the mark that it was trained with. If the student keeps the
modes apart, the diagonal entry is the smallest of its row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opd.tasks.encode import encode_prompt
from opd.tasks.modes import ModeSettings, mode_of
from student.data.mode_figures import asked_in
from student.data.needs import TEACHER
from student.data.row import Row
from student.job.evaluate import EvalMeasure
from student.learning.learner import Learner
from student.scoring.score import Scoring


def leakage(
    rows: Sequence[Row],
    modes: Mapping[str, ModeSettings],
    problems: int,
    *,
    scorer: Scoring,
    measure: EvalMeasure,
    learner: Learner,
    tokenizer: Any,
    poll: Callable[[], None],
) -> dict[str, float]:
    """Measure leakage/I/J for every pair of trained modes; a collective call, which every rank must make.

    Args:
        rows: answers in all modes, sampled at the temperature of the rollouts.
        modes: settings of the modes by name.
        problems: maximum number of answers in each mode that are scored, from the first on.
        scorer: asks the teachers for what `measure` needs.
        measure: the measure of the divergence.
        learner: holds the student.
        tokenizer: the student's tokenizer.
        poll: called while waiting.
    """
    found = {}
    modes = {name: mode for name, mode in modes.items() if mode.weight}
    for name in modes:
        mine = [row for row in rows if mode_of(row.prompt) == name][:problems]
        for other, mode in modes.items():
            asked = [asked_in(row, other, mode) for row in mine]
            # The marked prompt is a context of the teacher only. The row keeps the prompt that the student answered.
            for row in asked:
                row.contexts[TEACHER] = np.array(encode_prompt(row.prompt, tokenizer), dtype=np.uint32)

            def score(asked: Sequence[Row] = asked) -> None:
                for row in asked:
                    scorer.ask(row)
                scorer.wait(asked, poll=poll)

            learner.ranks.agree(score)
            with learner.whole():  # answers, and so the passes that read them, may differ between ranks
                total, tokens = measure.measure(learner, asked)
            if asked:
                found[f"leakage/{name}/{other}"] = total / max(1.0, tokens)
    return found
