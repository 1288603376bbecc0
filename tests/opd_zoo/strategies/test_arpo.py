"""ARPO: where episodes branch, what a branch begins with, and that the group stays as large as planned."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from rows import make_row
from thread_ranks import build, metrics_of, of, together

from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.needs import STUDENT
from student.data.plan import Branch, EpisodePlan, PlannedRow, StepPlan, plan_step
from student.data.row import Row
from student.rollout.episodes import EpisodePlayer
from student.rollout.requests import RolloutSpec
from student.settings.episodes import EpisodeSettings

LOCK = Lock(LockOptions(digits=4, turns=6))


def with_entropies(row: Row, entropies: list[float]) -> Row:
    """The row with two candidates per token whose truncated entropy is that of its turn, nats."""
    logp = np.full((row.length, 2), -np.inf)
    for (start, end), wanted in zip(row.turns, entropies, strict=True):
        grid = np.linspace(1e-9, 0.5, 200_001)
        two = -(grid * np.log(grid) + (1 - grid) * np.log1p(-grid))
        p = grid[np.argmin(abs(two - wanted))]
        logp[start:end] = np.log([1 - p, p])
    row.signals[STUDENT, PayloadKind.GATHER] = Scores(PayloadKind.GATHER, values=logp.astype(np.float32))
    return row


def episode(planned: PlannedRow, turns: int = 3, entropies: tuple[float, ...] = (0.1, 0.2, 0.6)) -> Row:
    """Turns of two tokens with one of the environment between them."""
    branch = planned.episode.branch if planned.episode else None
    row = make_row(3 * turns - 1, key=planned.key, prompt=planned.prompt)
    row.turns = tuple((3 * k, 3 * k + 2) for k in range(turns))
    row.origin, row.tags = "branch" if branch else "policy", {"ended": "success"}
    row.notes["branched"] = float(branch.turns) if branch else 0.0
    return with_entropies(row, list(entropies[:turns]))


def test_the_entropy_is_of_the_first_tokens_of_a_turn_over_the_likeliest_ids() -> None:
    (planned,) = of(1)([Prompt.make("q")]).rows
    row, made = episode(planned), build("arpo")
    assert [made.entropy(row, turn) for turn in range(3)] == pytest.approx([0.1, 0.2, 0.6], abs=1e-4)
    scores = row.signals[STUDENT, PayloadKind.GATHER].values
    assert scores is not None
    scores[7] = np.log(0.5)
    assert made.entropy(row, 2) == pytest.approx((0.6 + np.log(2)) / 2, abs=1e-4)
    assert build("arpo", tokens=1).entropy(row, 2) == pytest.approx(0.6, abs=1e-4)


def test_a_rise_never_makes_a_branch_less_likely_and_its_chance_is_p_plus_w_times_the_rise() -> None:
    (planned,) = of(1)([Prompt.make("q")]).rows
    made = build("arpo", gain=0.3)
    rows = [episode(replace(planned, key=replace(planned.key, sample=number))) for number in range(400)]
    rises = (-1.0, 0.0, 0.5, 1.0)
    chosen = np.array([[made.branches(row, 1, rise) for rise in rises] for row in rows])
    assert (np.diff(chosen.astype(int), axis=1) >= 0).all()
    assert chosen.mean(0) == pytest.approx([0.2, 0.5, 0.65, 0.8], abs=0.06)
    assert all(build("arpo", gain=9.0).branches(row, 1, 1.0) for row in rows[:50])


@pytest.mark.parametrize("ranks", [1, 2])
def test_branches_fill_the_group_early_turns_first_and_branch_again_in_the_next_round(ranks: int) -> None:
    made = build("arpo", probability=1.0, share=0.25, rounds=2)
    parts = together(ranks, lambda: made, episode, plan=of(8), groups=3)
    rows = [row for part, _, _ in parts for row in part]
    assert len(rows) == 24
    for uid in {row.key.uid for row in rows}:
        mine = sorted((row for row in rows if row.key.uid == uid), key=lambda row: row.key.sample)
        assert [row.key.sample for row in mine] == list(range(8))
        # Two from the start branch at turns 1 and 2; then the branches at turn 1 branch at their own turn 2.
        assert [(row.key.parent, int(row.notes["branched"])) for row in mine] == [
            *[(-1, 0), (-1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (3, 2)]
        ]
    found = metrics_of(parts[0][1])
    assert found["arpo/branched_share"] == 0.75 and found["arpo/diverged_share"] == 0
    assert 0.1 <= found["arpo/rise"] <= 0.5


def test_without_branches_the_rest_is_played_from_the_start() -> None:
    made = build("arpo", probability=0.0, gain=0.0)
    ((rows, sampling, _),) = together(1, lambda: made, episode, plan=of(4), groups=3)
    assert len(rows) == 12 and all(row.origin == "policy" for row in rows)
    assert metrics_of(sampling)["arpo/branched_share"] == 0
    single = lambda planned: episode(planned, turns=1)  # noqa: E731
    ((rows, _, _),) = together(1, lambda: build("arpo", probability=1.0), single, plan=of(4), groups=3)
    assert len(rows) == 12 and all(row.key.parent == -1 for row in rows)


def test_a_branch_begins_with_the_replayed_actions_of_its_episode_and_given_episodes_stay_as_they_are() -> None:
    def replayed(prompts: Sequence[Prompt]) -> StepPlan:
        planned = of(8)(prompts)
        plans = [EpisodePlan(replay=(str(row.key.sample),), given=row.key.sample in (0, 7)) for row in planned.rows]
        return replace(planned, rows=tuple(map(lambda row, plan: replace(row, episode=plan), planned.rows, plans)))

    played: dict[int, EpisodePlan] = {}

    def play(planned: PlannedRow) -> Row:
        assert planned.episode is not None
        played[planned.key.sample], row = planned.episode, episode(planned)
        row.origin = "expert" if planned.episode.given else row.origin
        return row

    ((rows, _, _),) = together(1, lambda: build("arpo", probability=1.0), play, plan=replayed, groups=1)
    assert [row.key.sample for row in rows] == list(range(8))
    assert [row.origin for row in rows] == ["expert", *["policy"] * 3, *["branch"] * 3, "expert"]
    assert all(played[row.key.sample].replay == played[row.key.parent].replay for row in rows if row.key.parent >= 0)


class Counting:
    """A student that says digits by the row's own sample and turn."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.asked = tokenizer, []

    def __call__(self, planned: Any, purpose: Any) -> list[Row]:
        self.asked += planned
        return [self.row(one) for one in planned]

    def row(self, one: PlannedRow) -> Row:
        text = str((one.key.sample * 7 + one.key.turn * 3) % 10)
        own = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        ids, given = [*one.prefix_ids, *own], len(one.prefix_ids)
        row = make_row(ids, key=one.key, prompt=one.prompt, text=text)
        row.behaviour_logp = np.where(np.arange(len(ids)) < given, np.nan, -0.1 * (one.key.sample + 1)).astype(
            np.float32
        )
        return row


def play(player: EpisodePlayer, student: Any, *planned: PlannedRow) -> list[Row]:
    return player.play(planned, student, purpose=("rollout",), on_row=lambda row: None)


def test_a_branch_begins_with_the_very_ids_and_log_probs_and_learns_from_them() -> None:
    tokenizer = make_tokenizer()
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=0, valid_vocab=len(tokenizer), max_prompt_tokens=64)
    player = EpisodePlayer(EpisodeSettings(turn_tokens=4, isolation="none"), tokenizer, spec)
    first, second = plan_step(1, [LOCK.draw(Random(0))], samples=2, max_new_tokens=80, temperature=1.0).rows
    student = Counting(tokenizer)
    (parent,) = play(player, student, first)
    assert len(parent.turns) == 6
    student.asked.clear()
    (branch,) = play(player, student, replace(second, episode=EpisodePlan(branch=Branch(parent, 2))))
    cut = parent.turns[2][0]
    assert branch.origin == "branch" and branch.on_policy and branch.trained and branch.notes["branched"] == 2
    assert branch.response_ids[:cut].tolist() == parent.response_ids[:cut].tolist()
    np.testing.assert_array_equal(branch.behaviour_logp[:cut], parent.behaviour_logp[:cut])
    np.testing.assert_array_equal(branch.loss_mask[:cut], parent.loss_mask[:cut])
    assert branch.turns[:3] == parent.turns[:3] and branch.turn_rewards[:2] == parent.turn_rewards[:2]
    assert branch.episode.states[:3] == parent.episode.states[:3] and len(branch.turns) == 6
    assert [one.key.turn for one in student.asked] == [2, 3, 4, 5]  # nothing was sampled again
    assert branch.response_ids[cut] != parent.response_ids[cut]
    player.close()


def test_an_episode_whose_beginning_was_replayed_branches_after_it() -> None:
    tokenizer = make_tokenizer()
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=0, valid_vocab=len(tokenizer), max_prompt_tokens=64)
    player = EpisodePlayer(EpisodeSettings(turn_tokens=4, isolation="none"), tokenizer, spec)
    prompt = LOCK.draw(Random(0))
    first, second = plan_step(1, [prompt], samples=2, max_new_tokens=80, temperature=1.0).rows
    begun = EpisodePlan(replay=tuple(prompt.extra["path"][:2]))
    (parent,) = play(player, Counting(tokenizer), replace(first, episode=begun))
    (branch,) = play(player, Counting(tokenizer), replace(second, episode=replace(begun, branch=Branch(parent, 1))))
    cut = parent.turns[1][0]
    assert branch.origin == "branch" and branch.trained and branch.turns[:2] == parent.turns[:2]
    assert branch.response_ids[:cut].tolist() == parent.response_ids[:cut].tolist()
    np.testing.assert_array_equal(branch.loss_mask[:cut], parent.loss_mask[:cut])
    player.close()


def test_an_environment_that_answers_otherwise_ends_the_branch_as_broken() -> None:
    tokenizer = make_tokenizer()
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=0, valid_vocab=len(tokenizer), max_prompt_tokens=64)
    player = EpisodePlayer(EpisodeSettings(turn_tokens=4, isolation="none"), tokenizer, spec)
    first, second = plan_step(1, [LOCK.draw(Random(0))], samples=2, max_new_tokens=80, temperature=1.0).rows
    (parent,) = play(player, Counting(tokenizer), first)
    between = parent.turns[0][1]
    parent.response_ids[between] = (parent.response_ids[between] + 1) % 10
    planned = replace(second, episode=EpisodePlan(branch=Branch(parent, 2)))
    (branch,) = play(player, Counting(tokenizer), planned)
    assert branch.tags["ended"] == "broken: diverged" and not branch.trained
    assert branch.verdict is not None and not branch.verdict.known
    player.close()
