"""The laws of GDRO: what is averaged, how weights follow it, and between which bounds answers move."""

import math
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd_zoo.samplers.gdro import NEW, Gdro, PromptGdro, PromptGdroSettings, RolloutGdro, RolloutGdroSettings
from student.data.outcome import Outcome, outcome_of
from student.data.plan import StepPlan, plan_step
from student.data.report import StepReport


def prompt_gdro(**settings: Any) -> PromptGdro:
    return PromptGdro(parse_settings(PromptGdroSettings, {"name": "prompt_gdro", **settings}))


def report(**rewards: list[float]) -> StepReport:
    outcomes = [Outcome(0, uid, i, reward=value) for uid, values in rewards.items() for i, value in enumerate(values)]
    return StepReport(0, {}, outcomes)


def planned(made: Any, count: int) -> tuple[StepPlan, list[Prompt]]:
    prompts = made.prompts(count)
    return plan_step(0, prompts, samples=2, max_new_tokens=8, temperature=1.0), prompts


def composed(made: Any, method: Gdro, plan: StepPlan) -> dict[str, Any]:
    """A row of each prompt, by its uid."""
    method.check(made.recipe, [])
    return {row.key.uid: row for row in method.compose(made.rows(method.plan(plan)))}


def test_a_loss_is_averaged_over_the_rows_of_the_class_that_their_prompt_had() -> None:
    method = prompt_gdro(beta=0.25, memory=0.0)
    method.observe(report(a=[0, 0, 0, 1], b=[1, 1]))
    assert method.average == {NEW: 0.5} and method.classes == {"a": 0, "b": 2}
    method.observe(report(a=[0, 0, 0, 0]))
    method.observe(report(a=[1, 1, 1, 0]))
    assert method.average == pytest.approx({NEW: 0.5, "0": 0.25 * 0.25 + 0.75 * 1.0}) and method.classes["a"] == 1


def test_a_variance_is_averaged_over_groups() -> None:
    method = RolloutGdro(parse_settings(RolloutGdroSettings, {"name": "rollout_gdro"}))
    assert method.measured([[1, 0, 0, 0], [1, 1]]) == pytest.approx(0.1875 / 2)


def test_weights_follow_the_loss_of_a_class_by_its_share_with_mean_one(run: Any) -> None:
    made, method = run("prompt_gdro"), prompt_gdro(eta=0.5, gamma=0.2)
    plan, prompts = planned(made, 6)
    method.classes = {prompts[0].uid: 0, prompts[1].uid: 2, prompts[2].uid: 2}
    method.average = {"0": 0.9, "2": 0.3, NEW: 0.5}
    rows = composed(made, method, plan)
    found = [rows[prompt.uid].weight for prompt in prompts]
    powers = [math.exp(0.5 * loss / share) for loss, share in ((0.9, 1 / 6), (0.3, 2 / 6), (0.5, 3 / 6))]
    raw = [0.8 * power / sum(powers) + 0.2 / 3 for power in powers]
    mean = (raw[0] + 2 * raw[1] + 3 * raw[2]) / 6
    assert [found[i] * mean for i in (0, 1, 2, 3, 5)] == pytest.approx([raw[0], raw[1], raw[1], raw[2], raw[2]])
    for place, known in ((0, 1.0), (5, 0.0)):
        notes = {"prompt_gdro/moved": abs(found[place] - 1), "prompt_gdro/known": known}
        assert rows[prompts[place].uid].notes == pytest.approx(notes)


def test_the_weight_of_a_rare_class_is_bounded(run: Any) -> None:
    made, method = run("prompt_gdro"), prompt_gdro(eta=60.0, gamma=0.0)
    plan, prompts = planned(made, 20)
    method.classes, method.average = {prompts[3].uid: 0}, {"0": 1.0}
    assert composed(made, method, plan)[prompts[3].uid].weight == 15.0


def test_prompts_without_a_rate_are_answered_as_the_most_uncertain_ones(run: Any) -> None:
    made = run("rollout_gdro", least=1, most=1.5)
    plan, prompts = planned(made, 3)
    made.method.classes = {prompts[0].uid: 0, prompts[1].uid: 1}
    made.method.average = {"0": 0.0, "1": 0.25}
    rows = made.method.plan(plan).rows
    assert [sum(row.prompt == prompt for row in rows) for prompt in prompts] == [1, 3, 2]
    notes = [composed(made, made.method, plan)[prompt.uid].notes for prompt in prompts]
    assert [note["rollout_gdro/moved"] for note in notes] == [1.0, 1.0, 0.0]
    assert [note["rollout_gdro/known"] for note in notes] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("edges", [[0.5, 0.4], [0.4, 0.4], [0.0, 0.5], [0.5, 1.0]])
def test_edges_that_do_not_rise_between_0_and_1_are_refused(edges: list[float]) -> None:
    with pytest.raises(ConfigError, match="must increase, between 0 and 1"):
        prompt_gdro(edges=edges)


def test_an_edge_belongs_to_the_class_above_it() -> None:
    moved = Gdro(parse_settings(PromptGdroSettings, {"name": "gdro", "edges": [0.5], "hysteresis": 0.25}))._moved
    assert [moved(None, 0.5), moved(0, 0.75), moved(1, 0.25), moved(1, 0.125)] == [1, 1, 1, 0]


def test_steps_and_bounds_that_leave_nothing_to_weigh_are_refused(run: Any) -> None:
    made = run("rollout_gdro")
    for least, most, fine in ((3, 1.25, True), (4, 3.0, False), (2, 1.2, False)):  # of 4 answers
        method = RolloutGdro(
            parse_settings(RolloutGdroSettings, {"name": "rollout_gdro", "least": least, "most": most})
        )
        if fine:
            method.check(made.recipe, [])
        else:
            with pytest.raises(ConfigError, match="lower least"):
                method.check(made.recipe, [])
    two, one = (
        made.recipe.model_copy(update={"rollout": made.recipe.rollout.model_copy(update={"prompts_per_step": count})})
        for count in (2, 1)
    )
    prompt_gdro().check(two, [])
    with pytest.raises(ConfigError, match=r"raise rollout\.prompts_per_step"):
        prompt_gdro().check(one, [])


def test_a_price_gives_answers_by_variance_and_rises_where_too_many_are_spent(run: Any) -> None:
    made = run("rollout_gdro", rule="price", least=1, most=4.0, rate=0.5)
    method = made.method
    plan, prompts = planned(made, 6)
    assert len(method.plan(plan).rows) == 12  # classes without a variance have as many answers as planned
    method.classes = {prompts[0].uid: 0, prompts[1].uid: 1}
    method.average = {"0": 0.25, "1": 0.0625, NEW: 0.25}
    method.price = -2.0 * math.log(2.0)  # half the price per standard deviation: twice as many
    counts = [sum(row.key.uid == prompt.uid for row in method.plan(plan).rows) for prompt in prompts]
    assert counts == [4, 2, 4, 4, 4, 4]
    rows = method.compose(made.rows(method.plan(plan)))
    before = method.state_dict()["price"]
    method.observe(StepReport(0, {}, [outcome_of(row) for row in rows]))
    assert method.price == pytest.approx(before + 0.5 * (22 / 12 - 1))
    long = run("rollout_gdro", rule="price", least=1, rate=0.2)
    spent = [found["rollout_gdro/spent"] for found in long.go(60)]
    assert sum(spent[20:]) / 40 == pytest.approx(1.0, abs=0.1)
