"""Episodes of an environment that has a place for only a few of them at a time."""

from collections.abc import Sequence
from random import Random

import pytest

from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.plan import PlannedRow
from student.data.row import Row
from student.rollout import episodes
from tests.support.environments import Crowded, CrowdedOptions
from tests.support.scripted import Scripted, make_player, plan


@pytest.mark.parametrize(("places", "batches"), [(2, [2, 2, 1]), (5, [5]), (0, [])])
def test_episodes_that_find_no_place_are_played_when_others_have_ended(
    monkeypatch: pytest.MonkeyPatch, places: int, batches: list[int]
) -> None:
    tokenizer = make_tokenizer()
    monkeypatch.setattr(episodes, "_PLACE_SECONDS", 0.0)
    prompts = [Crowded(CrowdedOptions(digits=4, turns=6, places=places)).draw(Random(seed)) for seed in range(5)]
    student = Scripted(tokenizer, {prompt.uid: prompt.extra["path"] for prompt in prompts})
    player, together = make_player(tokenizer, limits={"reset_seconds": 0.2}), []

    def sample(planned: Sequence[PlannedRow], purpose: tuple[object, ...]) -> list[Row]:
        together.append((planned[0].key.turn, len(planned)))
        return student(planned, purpose)

    for _ in range(2):  # the second time, it is known how many places there are
        rows = player.play(plan(prompts), sample, purpose=("rollout",), on_row=lambda row: None)
        assert [row.key for row in rows] == [row.key for row in plan(prompts)]
        assert {row.tags["ended"] for row in rows} == {"success" if places else "broken: full"}
        assert [count for turn, count in together if turn == 0] == batches
        together.clear()
    player.close()
    assert Crowded.taken == 0
