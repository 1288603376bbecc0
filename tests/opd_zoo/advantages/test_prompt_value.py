"""The value of a prompt as the baseline of its answers."""

import numpy as np
from rows import make_row

from opd.tasks.verdict import Verdict
from opd_zoo.advantages.prompt_value import PromptValue, PromptValueSettings
from student.data.row import CriticValues, EpisodeTrace
from student.plugin.terms import build_terms


def test_the_value_of_a_prompt_is_that_where_the_student_begins() -> None:
    advantage = PromptValue(PromptValueSettings(name="prompt_value"))
    made = make_row(
        4,
        loss_mask=np.array([False, False, True, True]),
        verdict=Verdict.score(1.0),
        critic=CriticValues(np.array([9.0, 9.0, 0.25, 0.5], np.float32)),
    )
    assert advantage.refine(made, 1.0) == 1.0 - 9.0
    # Replayed actions that a cut history leaves out have no value; the first window begins behind them.
    tools = np.array([True, True, False, False])
    made.turns, made.episode = ((2, 3), (3, 4)), EpisodeTrace(tools, ((1, 2, 3), (2, 3, 4)))
    assert advantage.refine(made, 1.0) == 1.0 - 0.25
    made.turns, made.episode = ((2, 4),), EpisodeTrace(tools, ((1, 2, 4),))
    (term,) = build_terms([{"name": "dapo_direct"}])
    places, advantages = term.steps(made)  # type: ignore[attr-defined]
    assert places.tolist() == [0] * 4 and advantages.tolist() == [1.0 - 0.25]
