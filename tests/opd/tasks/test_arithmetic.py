import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.tasks import TaskSettings, VerdictStatus, build_prompts

OPERATIONS = {"addition": "+", "subtraction": "-", "multiplication": "*"}


@pytest.mark.parametrize("name", OPERATIONS)
@given(seed=st.integers(0, 2**32), digits=st.integers(2, 6))
def test_worked_solutions_hold_the_true_result_and_verify(name, seed, digits):
    source = build_prompts(TaskSettings(task=name, options={"digits": digits}), seed=seed)
    prompt = source.prompts("train", 1)[0]
    left, right = map(int, prompt.text.rstrip("=").split(OPERATIONS[name]))
    true = {"+": left + right, "-": left - right, "*": left * right}[OPERATIONS[name]]
    assert prompt.answer == str(true) and true >= 0
    assert source.verify(prompt, prompt.extra["solution"]).status is VerdictStatus.CORRECT
    assert source.verify(prompt, f"{prompt.extra['solution']}0").status is VerdictStatus.WRONG


@given(seed=st.integers(0, 2**32))
def test_columns_of_a_sum_are_digit_sums_with_carry(seed):
    source = build_prompts(TaskSettings(task="addition", options={"digits": 4}), seed=seed)
    prompt = source.prompts("train", 1)[0]
    columns, _, result = prompt.extra["solution"].partition(":")
    columns = columns.split(" ")
    assert all(re.fullmatch(r"[01]\d", column) for column in columns)
    digits = [column[1] for column in columns]
    last = columns[-1][0]
    assert int(last + "".join(reversed(digits))) == int(result)


@given(left=st.integers(0, 10**6), right=st.integers(0, 10**6))
def test_columns_of_a_difference_hold_its_digits_and_true_borrows(left, right):
    from opd.tasks.arithmetic import ArithmeticOptions, Subtraction

    left, right = max(left, right), min(left, right)
    columns, result = Subtraction(ArithmeticOptions()).work(left, right)
    assert int("".join(column[0] for column in reversed(columns))) == result
    for position, column in enumerate(columns, 1):
        assert column[1] == str(int(left % 10**position < right % 10**position))


def test_known_worked_solutions():
    from opd.tasks.arithmetic import Addition, ArithmeticOptions, Multiplication, Subtraction

    options = ArithmeticOptions(digits=2)
    assert Addition(options).work(47, 85) == (["12", "13"], 132)
    assert Subtraction(options).work(54, 35) == (["91", "10"], 19)
    assert Multiplication(options).work(35, 8) == (["40", "28"], 280)


@pytest.mark.parametrize("completion", ["", "132", "12 13:", "12 13:13", ":1320", "12 13:132 :0", "::"])
def test_wrong_results_are_wrong(completion):
    from opd.tasks import Prompt
    from opd.tasks.arithmetic import Addition, ArithmeticOptions

    prompt = Prompt.make("47+85=", answer="132")
    wanted = VerdictStatus.CORRECT if completion == "132" else VerdictStatus.WRONG
    assert Addition(ArithmeticOptions()).verify(prompt, completion).status is wanted
