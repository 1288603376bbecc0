"""What stands before every rollout engine."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from opd.tasks.environments.lock import Lock, LockOptions
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.plan import PlannedRow
from student.data.row import Row
from student.rollout.policy_sampler import sample_or_play
from tests.support.scripted import Scripted, make_player, plan


def test_a_stop_is_seen_between_the_rows_of_a_turn_and_not_when_an_episode_ends() -> None:
    tokenizer, lock = make_tokenizer(), Lock(LockOptions(digits=4, turns=6))
    player = make_player(tokenizer)
    prompts = [lock.draw(Random(seed)) for seed in range(3)]
    student = Scripted(tokenizer, {prompt.uid: prompt.extra["path"] for prompt in prompts})
    turns: list[PlannedRow] = []

    class Engine:
        """Calls on_row as the engines do."""

        def sample(self, planned: Sequence[PlannedRow], *, purpose: Any, on_row: Any) -> list[Row]:
            turns.extend(planned)
            rows = student(planned, purpose)
            for row in rows:
                on_row(row)
            return rows

    def poll() -> None:
        raise InterruptedError

    ended: list[Row] = []
    with pytest.raises(InterruptedError):
        sample_or_play(Engine(), player, plan(prompts), on_row=ended.append, poll=poll)  # type: ignore[arg-type]
    player.close()
    assert len(turns) == 3 and not ended
