from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import ConfigError
from opd.tasks import TaskSettings, VerdictStatus, build_prompts
from opd.tasks.procedural import load_task


@pytest.mark.parametrize("name", ["restate", "running_sum", "parts"])
@given(seed=st.integers(0, 2**32))
def test_worked_solutions_verify_and_shortened_ones_do_not(name, seed):
    source = build_prompts(TaskSettings(task=name), seed=seed)
    prompt = source.prompts("train", 1)[0]
    solution = prompt.extra["solution"]
    assert source.verify(prompt, solution).status is VerdictStatus.CORRECT
    assert source.verify(prompt, solution[:-1]).status is VerdictStatus.WRONG


@given(seed=st.integers(0, 2**32), terms=st.integers(2, 40))
def test_running_totals_are_true_and_stay_below_100(seed, terms):
    source = build_prompts(TaskSettings(task="running_sum", options={"terms": terms}), seed=seed)
    prompt = source.prompts("train", 1)[0]
    expression = prompt.text.rstrip("=")
    assert eval(expression) == int(prompt.answer)
    totals = [int(total) for total in prompt.extra["solution"].partition(":")[0].split()]
    assert len(totals) == terms - 1 and all(0 <= total <= 99 for total in totals)


@given(
    seed=st.integers(0, 2**32),
    modulo=st.integers(2, 100),
    every=st.integers(0, 4),
    silent=st.integers(0, 9),
    largest=st.integers(1, 9),
)
def test_totals_modulo_a_number_are_those_of_additions_alone(seed, modulo, every, silent, largest):
    options = {"terms": 9, "modulo": modulo, "every": every, "silent": silent, "largest": largest}
    prompt = build_prompts(TaskSettings(task="running_sum", options=options), seed=seed).prompts("train", 1)[0]
    numbers = [int(number) for number in prompt.text.rstrip("=").split("+")]
    assert len(numbers) == 9 and all(1 <= number <= largest for number in numbers)
    totals = [sum(numbers[: end + 1]) % modulo for end in range(1, len(numbers))]
    shown = totals[silent:][every - 1 :: every] if every else []
    assert prompt.extra["solution"] == f"{' '.join(map(str, shown))}:{totals[-1]}"
    assert prompt.answer == str(totals[-1])


def test_settings_of_before_draw_the_problems_of_before():
    # Worlds that were built once have to find the same problems again.
    source = build_prompts(TaskSettings(task="running_sum", options={"terms": 5}), seed=0)
    drawn = [(prompt.text, prompt.extra["solution"]) for prompt in source.prompts("train", 2)]
    assert drawn == [("5+7+8-3-8=", "12 20 17 9:9"), ("3+4+8-5+1=", "7 15 10 11:11")]


def test_chains_that_cannot_be_drawn_are_refused():
    with pytest.raises(ConfigError, match="would make every total 0"):
        build_prompts(TaskSettings(task="running_sum", options={"modulo": 1}), seed=0)


def test_restate_wants_every_repetition():
    source = build_prompts(TaskSettings(task="restate", options={"times": 2}), seed=0)
    prompt = source.prompts("train", 1)[0]
    assert prompt.extra["solution"].endswith(f":{prompt.answer}" * 3)
    assert source.verify(prompt, f"x:{prompt.answer}:{prompt.answer}").value == 0.0
    assert source.verify(prompt, f"x:{prompt.answer}:0:{prompt.answer}").value == 0.0
    assert source.verify(prompt, f"x:{prompt.answer}:{prompt.answer}:{prompt.answer}").value == 1.0


def test_parts_give_credit_for_each_right_part():
    source = build_prompts(TaskSettings(task="parts"), seed=0)
    prompt = source.prompts("train", 1)[0]
    first, second, third = prompt.answer.split(";")
    assert source.verify(prompt, f"x:{first};y:{second};z:0").value == pytest.approx(2 / 3)
    assert source.verify(prompt, f"x:{first};y:{second};z:{third};w:1").value == pytest.approx(3 / 4)
    assert source.verify(prompt, f"x:{first};y:{second};z:{third}").status is VerdictStatus.CORRECT


def test_a_wrong_option_names_the_task_and_the_nearest_key():
    with pytest.raises(ConfigError, match=r"task running_sum.*'term'.*'terms'"):
        build_prompts(TaskSettings(task="running_sum", options={"term": 3}), seed=0)


def test_a_hint_stands_before_the_problem_and_changes_nothing_else():
    drawn = []
    for told in (False, True):
        settings = TaskSettings(task="running_sum", options={"terms": 4, "modulo": 6, "told": told})
        drawn.append(load_task(settings).draw(Random(3)))
    plain, told = drawn
    assert told.text == f"{plain.answer};{plain.text}" and told.extra == plain.extra and told.answer == plain.answer
