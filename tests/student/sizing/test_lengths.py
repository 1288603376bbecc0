"""What the plan takes episodes to be read as, against episodes that were played."""

from random import Random
from typing import Any

import pytest

from opd.config import parse_settings
from opd.tasks.environments.lock import Lock, LockOptions
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.plan import PlannedRow
from student.data.row import Row
from student.settings.recipe import Recipe
from student.sizing.lengths import largest, lengths_of
from student.sizing.memory import micro_batch, slots
from tests.support.scripted import Scripted, make_player, plan

TURNS, PROMPT = 12, 14
SUMMARY = {"context_tokens": 36, "tokens": 3, "most": 9, "instruction": "s"}


class Summing(Scripted):
    """Says the path, and wherever a summary is asked for two letters and an end."""

    def _row(self, one: PlannedRow) -> Row:
        said = self.script[one.key.uid]
        said.insert(one.key.turn, "xx") if one.max_new_tokens == SUMMARY["tokens"] else None
        return super()._row(one)


def recipe(tokens: int = 3 * TURNS, **episodes: Any) -> Recipe:
    rollout = {"max_prompt_tokens": PROMPT, "max_new_tokens": tokens, "prompts_per_step": 16, "cache_tokens": 999}
    rollout |= {"episodes": {"turns": TURNS, "turn_tokens": 2, **episodes}}
    data = {"run": "run", "model": {"path": "student"}, "prompts": {"task": "lock"}, "rollout": rollout}
    return parse_settings(Recipe, {**data, "train": {"micro_batch_tokens": 100}})


def played(**episodes: Any) -> Row:
    """Twelve turns of two ids, each but the last with an answer of one."""
    tokenizer = make_tokenizer()
    prompt = Lock(LockOptions(digits=TURNS, turns=TURNS)).draw(Random(0))
    player = make_player(tokenizer, turns=TURNS, **{"turn_tokens": 2, **episodes})
    student = Summing(tokenizer, {prompt.uid: list(prompt.extra["path"])})
    (row,) = player.play(plan([prompt], max_new_tokens=200), student, purpose=("rollout",), on_row=lambda row: None)
    player.close()
    assert len(row.prompt_ids) == PROMPT and row.tags["ended"] == "success"
    return row


@pytest.mark.parametrize(
    "episodes", [{}, {"history": 1}, {"history": 2}, {"history": 11}, {"history": "summary", "summary": SUMMARY}]
)
def test_planned_lengths_are_those_of_an_episode_that_was_played(episodes: dict[str, Any]) -> None:
    row, made = played(**episodes), recipe(**episodes)
    found = lengths_of(made, PROMPT, row.length)
    assert abs(found.sequences - len(row.sequences)) <= (1 if row.summaries else 0)
    assert found.width == pytest.approx(row.longest, rel=0.1)
    assert found.positions == pytest.approx(row.positions, rel=0.1)
    before = [len(row.prompt_ids) + start - since for since, start, end in written(row)]
    if episodes:
        assert found.prefilled == pytest.approx(sum(before), rel=0.2)


def written(row: Row) -> list[tuple[int, int, int]]:
    """(since, start, end) of each turn: where its history begins, and itself."""
    found = []
    for start, end in row.turns:
        since = next((one for one, _, last in row.sequences if start < last), 0)
        found.append((since, start, end))
    return found


def test_all_windows_of_an_episode_share_a_micro_batch_and_slots_are_as_wide_as_one() -> None:
    whole, short, one = recipe(), recipe(history=2), recipe(history="summary", summary=SUMMARY)
    assert (largest(whole).sequences, largest(whole).width, micro_batch(whole, 1)) == (1, 50, (2, 50))
    assert (largest(short).sequences, largest(short).width, micro_batch(short, 1)) == (10, 23, (10, 23))
    assert largest(one).width == 36 and micro_batch(one, 1) == (largest(one).sequences, 36)
    assert slots(whole, 1) == 16
    assert largest(recipe(history=1, turns=1)).sequences == 1


def test_summaries_bound_the_width_whatever_the_length_of_the_episode() -> None:
    for tokens in (100, 1000, 100_000):
        found = largest(recipe(tokens, history="summary", summary=SUMMARY))
        assert found.width == 36 and found.sequences <= SUMMARY["most"] + 1
