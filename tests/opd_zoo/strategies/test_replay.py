"""Groups that are kept: what comes back, in which order, on how many ranks, and after a checkpoint."""

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import thread_ranks
from saved_state import save_state
from thread_ranks import Ordered, build, keys, of, place, sampled, together

from student.data.outcome import outcome_of
from student.data.plan import PlannedRow
from student.data.report import StepReport
from student.data.row import Row
from student.data.states import row_from_state, row_to_state
from student.plugin.strategy import Strategy
from student.state.state_io import load_state


def steps(made: Strategy, count: int, reward: Any, ranks: int = 1) -> list[list[Row]]:
    found = []
    for step in range(count):
        parts = together(ranks, lambda: made, reward, plan=of(4, step))
        rows = [row for part, _, _ in parts for row in part]
        made.observe(StepReport(step, {}, [outcome_of(row) for row in rows]))
        found.append(rows)
    return found


def graded(planned: PlannedRow) -> Row:
    return sampled(planned, float(planned.key.sample % 2 and place(planned) > 0), length=1 + planned.key.sample)


def test_replay_brings_back_groups_that_taught_something(tmp_path: Path) -> None:
    made, again = build("replay", share=0.5), build("replay", share=0.5)
    first, second, third = steps(made, 3, graded)
    assert all(row.origin == "policy" for row in first)
    old = [row for row in second if row.origin == "replay"]
    assert old and all(row.key.step == 0 and not row.on_policy for row in old)
    assert len({outcome_of(row).reward for row in old}) == 2 and len(third) > 16
    save_state(tmp_path, "strategy", made.state_dict())
    again.load_state_dict(load_state(tmp_path, "strategy"))
    assert keys(steps(again, 1, graded)[0]) == keys(steps(made, 1, graded)[0])


def test_a_row_survives_a_checkpoint(tmp_path: Path) -> None:
    ((rows, _, _),) = together(1, lambda: build("single"), graded)
    row = rows[0]
    row.reward, row.tags, row.turns, row.behaviour_prompt_ids = 0.5, {"a": "b"}, ((0, 1),), np.ones(3, np.uint32)
    save_state(tmp_path, "row", row_to_state(row))
    copy = row_from_state(load_state(tmp_path, "row"))
    assert copy.key == row.key and copy.prompt == row.prompt and copy.response_ids.tolist() == row.response_ids.tolist()
    assert outcome_of(copy).to_dict() == outcome_of(row).to_dict() and copy.response_ids.dtype == np.uint32


def test_short_right_and_long_wrong_answers_go_first_and_the_others_later() -> None:
    made = build("rorecomp", wait=2, compensate=1.0)
    first, second = steps(made, 2, graded)
    assert not any(row.origin == "replay" for row in first)
    mixed = [row for row in first if int(row.key.uid, 16) % 3]
    for kind, wanted in ((1.0, min), (0.0, max)):
        mine = [row for row in mixed if row.verdict is not None and row.verdict.value == kind]
        lengths = {trained: {row.length for row in mine if row.trained == trained} for trained in (True, False)}
        assert wanted(*map(wanted, lengths.values())) in lengths[True] and not lengths[True] & lengths[False]
    later = [row for row in second if row.origin == "replay"]
    was = {(row.key.uid, row.key.sample): row.trained for row in first}
    assert later and all(row.trained != was[row.key.uid, row.key.sample] for row in later)
    assert len({row.key.uid for row in later}) == 2


def test_what_a_reward_took_out_of_the_loss_is_learnt_from_neither_first_nor_later() -> None:
    def out(planned: PlannedRow) -> Row:
        row = graded(planned)
        row.trained = planned.key.sample > 0  # the shortest wrong answer
        return row

    made = build("rorecomp", wait=2, compensate=1.0, alpha=0.5)
    first, second = steps(made, 2, out)
    later = [row for row in second if row.origin == "replay"]
    assert later and {row.key.sample for row in (*first, *later)} == {0, 1, 2, 3}
    assert all(row.key.sample > 0 for row in (*first, *later) if row.trained) and any(row.trained for row in first)


def test_a_store_that_is_full_forgets_what_was_drawn_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = thread_ranks.SOURCE.prompts("train", 4)
    for order in permutations(prompts):
        monkeypatch.setattr(thread_ranks, "SOURCE", Ordered(order))
        made = build("replay", capacity=2)
        steps(made, 1, lambda planned: sampled(planned, float(planned.key.sample % 2)))
        assert [group[0].key.uid for group in made.groups] == [prompt.uid for prompt in order[2:]]


@pytest.mark.parametrize("name", ["replay", "rorecomp"])
def test_ranks_keep_the_same_groups(name: str) -> None:
    settings = {"share": 1.0} if name == "replay" else {"wait": 2, "compensate": 1.0}
    alone, pair = build(name, **settings), build(name, **settings)
    assert [keys(rows) for rows in steps(alone, 3, graded)] == [keys(rows) for rows in steps(pair, 3, graded, ranks=2)]
