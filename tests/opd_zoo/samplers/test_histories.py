"""ScaleRL's retirement, SwS and ExIt: what a prompt's history makes of it."""

from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.tasks.prompt import Prompt
from opd_zoo.samplers.retire import Retire, RetireSettings
from opd_zoo.samplers.weak_prompts import WeakPrompts, WeakPromptsSettings
from student.data.outcome import Outcome
from student.data.report import StepReport


def report(**rewards: list[float]) -> StepReport:
    """Rewards by uid, whose first letter is the domain."""
    return StepReport(
        0,
        {},
        [Outcome(0, uid, i, domain=uid[0], reward=r) for uid, found in rewards.items() for i, r in enumerate(found)],
    )


def test_a_prompt_that_is_solved_often_enough_is_never_drawn_again(run: Any, rate: Any) -> None:
    made = Retire(parse_settings(RetireSettings, {"name": "retire"}))
    made.observe(report(a1=[1.0] * 9 + [0.0], a2=[1.0] * 8 + [0.0] * 2))
    assert made.retired == {"a1"}
    made.observe(report(a1=[0.0] * 4))
    assert made.retired == {"a1"}
    going = run("retire", limit=0.9)
    for _ in range(20):
        plan = going.plan()
        assert not {row.key.uid for row in plan.rows} & going.method.retired
        going.finish(plan)
    assert len(going.method.retired) >= 6 and np.mean([rate(row.prompt) for row in going.plan().rows]) < 0.45


def test_a_prompt_is_weak_where_it_never_succeeds_half_of_the_time_and_does_not_rise() -> None:
    made = WeakPrompts(parse_settings(WeakPromptsSettings, {"name": "weak_prompts"}))
    histories = {"falls": [0.4, 0.2], "stays": [0.25] * 3, "rises": [0.1, 0.2], "once": [0.0], "half": [0.5, 0.0]}
    made.history = dict(histories)
    assert [made.weak(name) for name in histories] == [True, True, False, False, False]


def test_weak_prompts_come_first_and_then_new_ones_of_their_domains() -> None:
    made = WeakPrompts(parse_settings(WeakPromptsSettings, {"name": "weak_prompts"}))
    pool = [Prompt.make(text, domain=domain) for text, domain in (("1", "w"), ("2", "w"), ("3", "s"), ("4", "w"))]
    new = [Prompt.make("5", domain="w"), Prompt.make("6", domain="s"), Prompt.make("7", domain="other")]
    for successes in ([0.0, 0.0, 1.0, 1.0], [0.0, 0.25, 1.0, 1.0]):
        outcomes = [Outcome(0, p.uid, 0, domain=p.domain or "", reward=r) for p, r in zip(pool, successes, strict=True)]
        made.observe(StepReport(0, {}, outcomes))
    # Of domain w one of three is weak: it stays at 0, the second rises, and the last is solved.
    found = made.scores([*pool, *new], np.random.default_rng(0))
    assert found == pytest.approx([1, 0, 0, 0, 1 / 6, 0, 0], abs=1e-5) and len(set(found)) == 7


def test_an_earlier_answer_is_shown_again_and_the_larger_its_variance_the_more_often(run: Any) -> None:
    made = run("exit", again=1.0, new=0.0)
    (prompt,) = made.prompts(1)
    made.method.buffer = {prompt.uid: [("clear", 0.25), ("dull", 0.05)]}
    shown = []
    for step in range(200):
        made.step, made.taken = step, 0
        (asked,) = {row.prompt.text for row in made.plan().rows if row.key.uid == prompt.uid}
        shown.append("clear" in asked)
        assert asked.startswith(str(prompt.text)) and "Improve it." in asked
    assert np.mean(shown) == pytest.approx(0.25 / 0.3, abs=0.08)


def test_answers_of_groups_that_differ_are_kept_with_their_variance(run: Any) -> None:
    made = run("exit", keep=2, new=0.0)
    found = made.go(6)
    kept = made.method.buffer
    assert kept and all(len(entries) <= 2 and all(0 < v <= 0.25 for _, v in entries) for entries in kept.values())
    assert any(line["exit/again"] > 0 for line in found) and found[0]["exit/again"] == 0
    assert all(text == "0" for entries in kept.values() for text, _ in entries)
