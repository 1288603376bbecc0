"""TCOD's rivals: TurnOPD's depth, ReOPD's places, and episodes that are left out."""

from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from opd_zoo.curricula.episode_filter import EpisodeFilter, EpisodeFilterSettings
from opd_zoo.curricula.prefix_replay import PrefixReplay, PrefixReplaySettings
from opd_zoo.curricula.turnopd import TurnOpd, TurnOpdSettings, horizon
from student.data.outcome import Outcome
from student.data.plan import EpisodePlan, StepPlan, plan_step
from student.data.report import StepReport

PROMPT = Lock(LockOptions(digits=4, turns=6)).draw(Random(0))


def plan(step: int, prompt: Prompt = PROMPT, samples: int = 1) -> StepPlan:
    return plan_step(step, [prompt], samples=samples, max_new_tokens=80, temperature=1.0)


def played(turns: int, ended: str, kl: list[float]) -> Outcome:
    notes = {"turns": float(turns), **{f"turn_kl/{turn}": value for turn, value in enumerate(kl)}}
    return Outcome(0, "u", 0, tags={"ended": ended}, notes=notes)


def test_the_depth_is_the_larger_of_coverage_and_the_centroid_of_the_divergence() -> None:
    won = [played(turns, "success", [1.0]) for turns in (2, 4, 6, 8, 10)]
    lost = played(30, "turns", [1.0])
    assert horizon([*won, lost], 0.8) == pytest.approx(np.quantile([2, 4, 6, 8, 10], 0.8))
    # Without a success all episodes count; the centroid of 3 + 1 nats at turn 1 and 4 at turn 5 is 3.
    late = [played(2, "turns", [3.0, 0.0, 0.0, 0.0, 4.0]), played(1, "turns", [1.0])]
    assert horizon(late, 0.5) == pytest.approx(3.0)
    assert horizon([played(2, "turns", [])], 0.8) is None


def test_a_centroid_gives_noise_below_zero_no_weight() -> None:
    # 2 nats at turn 1 and 6 at turn 3, and -4 at turn 2: (2 + 18) / 8.
    assert horizon([played(1, "turns", [2.0, -4.0, 6.0])], 0.5) == pytest.approx(2.5)
    assert horizon([played(1, "turns", [-1.0])], 0.5) is None


def test_a_depth_is_smoothed_rounded_up_and_held_in_its_range() -> None:
    settings = {"name": "turnopd", "probe_every": 2, "probes": 2, "smoothing": 0.75, "shortest": 3}
    method = TurnOpd(parse_settings(TurnOpdSettings, settings))
    method.observe(StepReport(0, {}, [played(1, "success", [1.0])] * 2))  # as many as are needed
    assert method.state_dict() == {"horizon": 1.0} and method.depth(1) == 3
    method.observe(StepReport(2, {}, [played(9, "success", [1.0])] * 2 + [played(99, "broken: hung", [1.0])]))
    method.observe(StepReport(4, {}, [played(9, "success", [1.0])] * 2))
    assert method.state_dict() == {"horizon": 0.75 * 3.0 + 0.25 * 9} and method.depth(5) == 5  # 4.5
    fresh = TurnOpd(parse_settings(TurnOpdSettings, settings))
    fresh.load_state_dict({"horizon": None})
    assert fresh.depth(1) == 0
    with pytest.raises(ConfigError, match="more than longest"):
        parse_settings(TurnOpdSettings, {**settings, "longest": 2})


def test_rows_that_are_not_played_are_not_cut() -> None:
    method = TurnOpd(parse_settings(TurnOpdSettings, {"name": "turnopd"}))
    method.load_state_dict({"horizon": 4.0})
    rows = [*plan(1, Prompt.make("1+1=")).rows, *plan(1).rows]
    given = replace(rows[1], episode=EpisodePlan(replay=("a",), given=True))
    made = method.plan(StepPlan(1, (rows[0], rows[1], given))).rows
    assert made[0] == rows[0] and made[2] == given
    assert made[1].episode == EpisodePlan(turns=4)


def test_steps_between_full_ones_are_cut_and_only_full_ones_move_the_depth() -> None:
    settings = {"name": "turnopd", "probe_every": 4, "probes": 2, "smoothing": 0.5, "longest": 6}
    method = TurnOpd(parse_settings(TurnOpdSettings, settings))
    assert method.plan(plan(1)).rows[0].episode is None  # nothing is known yet
    few = [played(3, "success", [1.0])]
    method.observe(StepReport(0, {}, few))
    assert method.depth(1) == 0  # too few episodes
    given = replace(played(9, "success", []), origin="expert")  # a path that was not the student's
    method.observe(StepReport(1, {}, [*[played(4, "success", [1.0])] * 3, *[given] * 9]))
    assert method.depth(2) == 4 and method.depth(4) == 0
    episode = method.plan(plan(2)).rows[0].episode
    assert episode is not None and episode.turns == 4
    ahead: Any = [Outcome(2, "p", 0, tags={**row.tags, "ended": "turns"}) for row in method.plan(plan(2)).rows]
    method.observe(StepReport(2, {}, [played(1, "success", [1.0])] * 3))
    assert method.depth(3) == 4  # a capped step says nothing about depth
    method.observe(StepReport(4, {}, [played(9, "success", [1.0])] * 3))
    assert method.depth(5) == 6  # smoothed to 6.5, at most 6
    services: Any = SimpleNamespace(outcomes=ahead)  # rows that were planned before that
    assert method.after_update(5, services)["turn_depth"] == 4.0
    again = TurnOpd(parse_settings(TurnOpdSettings, settings))
    again.load_state_dict(method.state_dict())
    assert again.depth(5) == 6


def test_places_of_a_path_are_drawn_with_falling_chances() -> None:
    method = PrefixReplay(parse_settings(PrefixReplaySettings, {"name": "prefix_replay"}))
    made = method.plan(plan(0, samples=4000))
    assert made == method.plan(plan(0, samples=4000))  # a step that was interrupted is planned the same
    lengths = Counter(len(row.episode.replay) for row in made.rows if row.episode)
    weights = 0.6 ** np.arange(4)
    shares = np.array([lengths[t] for t in range(4)]) / 4000
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.03)
    episode = made.rows[0].episode
    assert episode is not None and episode.turns == 1
    assert list(episode.replay) == PROMPT.extra["path"][: len(episode.replay)]


def test_a_prompt_without_a_path_cannot_be_replayed() -> None:
    bare = Prompt.make("x", extra={"environment": {"name": "lock"}})
    method = PrefixReplay(parse_settings(PrefixReplaySettings, {"name": "prefix_replay"}))
    with pytest.raises(DataError, match="has no recorded path"):
        method.plan(plan(0, bare))


@pytest.mark.parametrize(
    ("settings", "trained"),
    [({"ended": ["turns"]}, [True, False, True]), ({"bad_calls": True}, [True, True, False])],
)
def test_episodes_are_left_out_of_the_loss_and_stay_in_the_statistics(
    settings: dict[str, Any], trained: list[bool]
) -> None:
    row = make_row(prompt=PROMPT)
    rows = [
        replace(row, tags={"ended": "success"}, notes={"bad_calls": 0.0}),
        replace(row, tags={"ended": "turns"}, notes={"bad_calls": 0.0}),
        replace(row, tags={"ended": "success"}, notes={"bad_calls": 2.0}),
    ]
    method = EpisodeFilter(parse_settings(EpisodeFilterSettings, {"name": "episode_filter"} | settings))
    found = method.compose(rows)
    assert len(found) == 3 and [row.trained for row in found] == trained
    assert [row.notes["filtered"] for row in found] == [float(not one) for one in trained]


def test_an_episode_with_a_turn_of_neither_a_call_nor_code_nor_an_answer_is_void() -> None:
    turns = {
        "calls": ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', "A: 7"],
        "code": ["```python\nprint(7)\n```", "A: 7"],
        "open": ["```python\nprint(7)", "A: 7"],
        "late": ["A: 7", "Let me think about it."],
    }
    rows = []
    for texts in turns.values():
        ids = [list(text.encode()) for text in texts]
        row = make_row([*ids[0], *ids[1]], prompt=PROMPT, tags={"ended": "success"})
        row.turns = ((0, len(ids[0])), (len(ids[0]), row.length))
        rows.append(row)
    method = EpisodeFilter(parse_settings(EpisodeFilterSettings, {"name": "episode_filter", "void": True}))
    method.services = SimpleNamespace(  # type: ignore[assignment]
        tokenizer=SimpleNamespace(decode=lambda ids: bytes(ids).decode()),
        extract=lambda found: [row.text.partition("A: ")[2] or None for row in found],
    )
    assert [row.trained for row in method.compose(rows)] == [True, True, False, False]


def test_a_filter_that_leaves_nothing_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="left out"):
        parse_settings(EpisodeFilterSettings, {"name": "episode_filter"})
