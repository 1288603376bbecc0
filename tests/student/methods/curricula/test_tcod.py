"""TCOD's schedule, its ways through an episode, and the depth that follows the divergence."""

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
from opd.wire.types import PayloadKind, Scores
from student.data.needs import TEACHER
from student.data.outcome import Outcome
from student.data.plan import EpisodePlan, StepPlan, plan_step
from student.data.report import StepReport
from student.data.row import EpisodeTrace
from student.methods.curricula.tcod import Tcod, TcodSettings
from student.methods.curricula.turns import note_turns, turn_divergences, turn_metrics

LOCK = Lock(LockOptions(digits=6, turns=9))


def make(**settings: Any) -> Tcod:
    return Tcod(parse_settings(TcodSettings, {"name": "tcod"} | settings))


def planned(step: int, count: int = 4) -> StepPlan:
    prompts = [LOCK.draw(Random(seed)) for seed in range(count)]
    return plan_step(step, prompts, samples=2, max_new_tokens=64, temperature=1.0)


def test_the_depth_grows_by_one_every_eta_steps_up_to_the_limit() -> None:
    method = make(start=2, every=3, turns=4)
    assert [method.depth(step) for step in range(9)] == [2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_front_to_back_cuts_and_back_to_front_replays_the_rest_of_the_path() -> None:
    cut = make(order="f2b", every=1).plan(planned(2))
    assert {row.episode for row in cut.rows} == {EpisodePlan(turns=3)}
    back = make(order="b2f", every=1).plan(planned(2))
    for row in back.rows:
        path = tuple(row.prompt.extra["path"])
        assert row.episode == EpisodePlan(replay=path[:3])
    whole = make(order="b2f", every=1).plan(planned(20))
    assert {row.episode for row in whole.rows} == {EpisodePlan()}


def test_mixed_sends_the_samples_of_a_prompt_the_same_way() -> None:
    rows = make(order="mixed").plan(planned(1, count=16)).rows
    ways = [bool(row.episode and row.episode.replay) for row in rows]
    assert ways[::2] == ways[1::2] and 0 < sum(ways) < len(ways)
    assert make(order="mixed").plan(planned(1, count=16)).rows == rows


def test_a_fixed_horizon_stays_and_zero_leaves_episodes_alone() -> None:
    assert {row.episode for row in make(order="fixed", start=3).plan(planned(50)).rows} == {EpisodePlan(turns=3)}
    assert make(order="fixed", start=0).plan(planned(50)) == planned(50)


def test_prompts_without_an_environment_are_left_alone_and_without_a_path_refused() -> None:
    plain = plan_step(0, [Prompt.make("1+1=")], samples=1, max_new_tokens=4, temperature=1.0)
    assert make().plan(plain) == plain
    bare = Prompt.make("x", extra={"environment": {"name": "lock"}})
    with pytest.raises(DataError, match="has no recorded path"):
        make(order="b2f").plan(plan_step(0, [bare], samples=1, max_new_tokens=4, temperature=1.0))


def outcomes(*turns: float, ended: str = "success") -> list[Outcome]:
    notes = {f"turn_kl/{turn}": value for turn, value in enumerate(turns)} | {"turns": float(len(turns))}
    return [Outcome(0, "a", 0, tags={"ended": ended}, notes=notes)]


def test_adaptive_depth_waits_until_the_deepest_turn_is_near_the_first() -> None:
    method = make(adaptive=True, multiple=2.0, smoothing=0.5, turns=3)
    method.observe(StepReport(0, {}, outcomes(1.0)))
    assert method.depth(100) == 2  # the first turn is its own measure
    method.observe(StepReport(1, {}, outcomes(1.0, 8.0)))
    assert method.depth(100) == 2
    method.observe(StepReport(2, {}, outcomes(1.0, 1.0)))
    saved = method.state_dict()
    method.observe(StepReport(3, {}, outcomes(1.0, 1.0)))
    method.observe(StepReport(4, {}, outcomes(1.0, 1.0)))
    assert method.depth(100) == 3
    again = make(adaptive=True, multiple=2.0, smoothing=0.5, turns=3)
    again.load_state_dict(saved)
    assert again.depth(0) == 2 and again.state_dict() == saved


def test_adaptive_depth_smooths_each_turn_and_compares_the_deepest_with_so_many_times_the_first() -> None:
    method = make(adaptive=True, start=2, multiple=2.5, smoothing=0.75, turns=9)
    method.observe(StepReport(0, {}, outcomes(1.0, 3.0)))
    assert method.depth(0) == 2
    method.observe(StepReport(1, {}, outcomes(2.0, 3.0)))  # 0.75 1 + 0.25 2 = 1.25, and 3 <= 2.5 1.25
    assert method.depth(0) == 3
    assert method.state_dict()["smoothed"] == {"0": 1.25, "1": 3.0}
    method.observe(StepReport(2, {}, outcomes(1.25, 3.0, 3.125)))
    assert method.depth(0) == 4  # as much as 2.5 times is enough
    fixed = make()
    fixed.observe(StepReport(0, {}, outcomes(1.0)))
    assert fixed.state_dict() == {"depth": 1, "smoothed": {}}


def test_a_replay_is_never_longer_than_the_path_less_the_depth() -> None:
    for row in make(order="b2f", start=9).plan(planned(0)).rows:
        assert row.episode == EpisodePlan()


def test_the_divergence_of_a_turn_sums_over_its_tokens_and_counts_from_the_start_of_the_episode() -> None:
    length = 6
    row = make_row(
        length,
        behaviour=np.array([-1, -2, np.nan, -3, -4, np.nan]),
        loss_mask=np.array([1, 1, 0, 1, 1, 0], bool),
        episode=EpisodeTrace(np.array([0, 0, 1, 0, 0, 1], bool)),
        turns=((0, 2), (3, 5)),
        tags={"ended": "success"},
        notes={"replayed": 2.0},
    )
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.full(length, -5.0, np.float32), weights_hash="")
    note_turns(row)
    assert row.notes["turn_kl/2"] == pytest.approx(7.0) and row.notes["turn_kl/3"] == pytest.approx(3.0)


def test_summaries_are_summed_apart_and_are_no_turns() -> None:
    row = make_row(
        4,
        behaviour=np.array([-1, -2, -3, -4]),
        turns=((0, 1), (1, 3), (3, 4)),
        episode=EpisodeTrace(np.zeros(4, bool), summaries=(1,)),
        tags={"ended": "success"},
    )
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.full(4, -5.0, np.float32), weights_hash="")
    note_turns(row)
    assert row.notes == {"turn_kl/0": 4.0, "turn_kl/1": 1.0, "summary_kl": 5.0}
    plain = outcomes(2.0, 2.0)
    metrics = turn_metrics([Outcome(0, "a", 0, tags={"ended": "success"}, notes=row.notes), *plain])
    assert metrics["episode_kl"] == (10.0 + 4.0) / 2 and metrics["summary_kl"] == 5.0


def test_given_episodes_say_nothing_of_the_student() -> None:
    row = make_row(
        3,
        behaviour=np.full(3, np.nan),
        episode=EpisodeTrace(np.array([0, 0, 1], bool)),
        turns=((0, 2),),
        origin="expert",
    )
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.full(3, -5.0, np.float32), weights_hash="")
    note_turns(row)
    assert not row.notes
    given = Outcome(0, "b", 0, origin="expert", tags={"ended": "success"}, notes={"turns": 9.0})
    found = outcomes(1.0, 2.0)
    assert turn_metrics([*found, given]) == turn_metrics(found) and turn_metrics([given]) == {}


def test_metrics_tell_escalation_and_broken_episodes() -> None:
    found = outcomes(1.0, 2.0, 3.0) + outcomes(3.0, 2.0, ended="broken: hung")
    assert turn_divergences(found) == {0: 2.0, 1: 2.0, 2: 3.0}
    metrics = turn_metrics(found)
    assert metrics["kl_escalation"] == pytest.approx(1.5) and metrics["episode_kl"] == pytest.approx(5.5)
    assert metrics["kl_by_turn/3"] == 3.0 and metrics["turns"] == 2.5
    assert turn_metrics([]) == {}
    assert "summary_kl" not in metrics and metrics["episodes_ended_in_replay"] == 0.0
    # Thirds of six turns: (4 + 6) / 2 over (1 + 3) / 2; none over what noise has made negative.
    assert turn_metrics(outcomes(1.0, 3.0, 0.0, 0.0, 4.0, 6.0))["kl_escalation"] == 2.5
    assert "kl_escalation" not in turn_metrics(outcomes(-1.0, 1.0, 2.0))
    unscored = Outcome(0, "a", 0, tags={"ended": "replay"})
    mixed = turn_metrics([*outcomes(1.0, 2.0), unscored])
    assert mixed["episodes_ended_in_replay"] == 0.5 and mixed["turns"] == 1.0 and mixed["episode_kl"] == 3.0
    assert turn_metrics([unscored]) == {"turns": 0.0, "episodes_ended_in_replay": 1.0}
    services: Any = SimpleNamespace(outcomes=found)
    assert make().after_update(4, services)["turn_depth"] == 0.0  # whole episodes
    assert "turn_depth" not in make().after_update(4, SimpleNamespace(outcomes=[]))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [make(adaptive=True), make(order="fixed", start=1), make(order="b2f")])
def test_the_depth_that_is_told_is_that_of_the_rows_and_not_of_the_step_that_learns_them(method: Tcod) -> None:
    rows = method.plan(planned(0)).rows  # sampled ahead, before the depth of the step is known
    if method.settings.adaptive:
        method.observe(StepReport(0, {}, outcomes(1.0)))
        assert method.depth(4) == 2
    found: Any = [Outcome(0, "a", i, tags={**row.tags, "ended": "turns"}) for i, row in enumerate(rows)]
    assert method.after_update(4, SimpleNamespace(outcomes=found))["turn_depth"] == 1.0  # type: ignore[arg-type]


def test_settings_that_cannot_work_are_refused() -> None:
    for wrong, message in (({"adaptive": True, "order": "b2f"}, "use order f2b"), ({"start": 0}, "never act")):
        with pytest.raises(ConfigError, match=message):
            make(**wrong)
