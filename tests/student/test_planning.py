"""Streams, schedules, needs and plans: the pure parts of a step."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import REFERENCE, TEACHER, Needs, SignalNeed, merge
from student.data.plan import plan_step
from student.data.schedule import learning_rate
from student.data.streams import stream, uniforms


def test_a_stream_depends_on_each_of_its_names() -> None:
    base = stream(1, "rollout", 3, "abc", 0).random(4).tolist()
    assert stream(1, "rollout", 3, "abc", 0).random(4).tolist() == base
    others = [
        (2, "rollout", 3, "abc", 0),
        (1, "eval", 3, "abc", 0),
        (1, "rollout", 4, "abc", 0),
        (1, "rollout", 3, "abc", 1),
    ]
    assert all(stream(*names).random(4).tolist() != base for names in others)


def test_names_do_not_run_into_each_other() -> None:
    assert stream(0, "a", "bc").random() != stream(0, "ab", "c").random()


def test_uniforms_lie_strictly_inside_the_unit_interval_and_are_uniform() -> None:
    drawn = uniforms(stream(0, "u"), 100_000)
    assert drawn.min() > 0.0 and drawn.max() < 1.0
    histogram, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(histogram - 10_000).max() < 500


def test_warmup_is_linear_and_decay_ends_at_the_floor() -> None:
    def rate(step: int) -> float:
        return learning_rate(step, peak=1.0, warmup=4, total=14, schedule="cosine", floor=0.1)

    assert [rate(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    assert rate(9) == pytest.approx(0.55)
    assert rate(14) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("schedule", "shape"), [("constant", 1.0), ("linear", 0.8), ("cosine", (1 + math.cos(math.pi / 5)) / 2)]
)
def test_a_fifth_of_the_way_down_schedules_are_apart(schedule: Any, shape: float) -> None:
    rate = learning_rate(6, peak=2.0, warmup=4, total=14, schedule=schedule)
    assert rate == pytest.approx(2.0 * shape)


@given(st.integers(0, 100), st.sampled_from(["constant", "linear", "cosine"]))
def test_a_learning_rate_stays_between_zero_and_its_peak(step: int, schedule: str) -> None:
    rate = learning_rate(step, peak=2.0, warmup=7, total=60, schedule=schedule, floor=0.0)  # type: ignore[arg-type]
    assert 0.0 <= rate <= 2.0


def need(role: str, spec: PayloadSpec, temperature: float | None = None) -> Needs:
    return Needs(signals=(SignalNeed(role, spec, temperature),))


def test_merging_takes_the_widest_k_and_drops_what_is_carried_anyway() -> None:
    merged = merge(
        [
            need(TEACHER, PayloadSpec.sampled()),
            need(TEACHER, PayloadSpec.gather(4)),
            need(TEACHER, PayloadSpec.gather(9)),
        ]
    )
    assert [(s.role, s.spec.kind, s.spec.k) for s in merged.signals] == [(TEACHER, PayloadKind.GATHER, 9)]
    assert merged.candidates == 9


def test_merging_keeps_roles_apart() -> None:
    merged = merge([need(TEACHER, PayloadSpec.gather(4)), need(REFERENCE, PayloadSpec.sampled())])
    assert {(s.role, s.spec.kind) for s in merged.signals} == {
        (TEACHER, PayloadKind.GATHER),
        (REFERENCE, PayloadKind.SAMPLED),
    }


def test_gathers_of_all_roles_share_the_widest_candidates() -> None:
    merged = merge([need(TEACHER, PayloadSpec.gather(4)), need(REFERENCE, PayloadSpec.gather(16))])
    assert {s.spec.k for s in merged.signals} == {16}


def test_two_temperatures_of_one_role_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.5"):
        merge([need(TEACHER, PayloadSpec.sampled(), 0.5), need(TEACHER, PayloadSpec.gather(4))])


def test_a_signal_that_names_no_temperature_has_that_of_the_rollouts() -> None:
    merged = merge([need(TEACHER, PayloadSpec.sampled()), need(REFERENCE, PayloadSpec.gather(4), 2.0)], temperature=0.7)
    assert {s.role: s.level for s in merged.signals} == {TEACHER: 0.7, REFERENCE: 2.0}
    same = merge([need(TEACHER, PayloadSpec.sampled(), 0.7), need(TEACHER, PayloadSpec.gather(4))], temperature=0.7)
    assert [s.level for s in same.signals] == [0.7]
    with pytest.raises(ConfigError, match=r"temperatures 1\.0 and 0\.7"):
        merge([need(TEACHER, PayloadSpec.sampled(), 1.0), need(TEACHER, PayloadSpec.gather(4))], temperature=0.7)


def test_a_repeated_prompt_gets_fresh_sample_indices() -> None:
    prompt = Prompt.make("1+1=")
    plan = plan_step(3, [prompt, prompt], samples=2, max_new_tokens=5, temperature=1.0)
    assert [row.key.sample for row in plan.rows] == [0, 1, 2, 3]


def test_shards_hold_whole_groups_and_add_up_to_the_plan() -> None:
    prompts = [Prompt.make(f"{i}+1=") for i in range(5)]
    plan = plan_step(0, prompts, samples=3, max_new_tokens=5, temperature=1.0)
    shards = [plan.shard(rank, 2).rows for rank in range(2)]
    assert sorted(r.key.uid for s in shards for r in s) == sorted(r.key.uid for r in plan.rows)
    assert not {r.key.uid for r in shards[0]} & {r.key.uid for r in shards[1]}
