import pytest

from opd.tasks.equal import NumericVerifier, last_number
from opd.tasks.json_answer import JsonVerifier, find_json
from opd.tasks.prompt import Prompt

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 42.", 42.0),
        ("1 then 2", 2.0),
        ("-3.5e2", -350.0),
        ("12,345 apples", 12345.0),
        ("x1 and v2", None),
        ("", None),
        ("1e999 and 7e-1", 0.7),
        ("so x = \u22123", -3.0),
        ("a loss of -$1,250.50", -1250.5),
        ("the range 3-$5", 5.0),
        ("a probability of .25", 0.25),
        ("it is 1.5cm long", 1.5),
        ("1,234km", 1234.0),
        ("42 on the 3rd day", 42.0),
        ("3/4", 0.75),
        ("-1/2 of it", -0.5),
        ("5/0", 0.0),
    ],
)
def test_the_last_number_of_a_text_is_found(text, number):
    assert last_number(text) == number


def test_numbers_are_compared_by_value():
    verifier = NumericVerifier()
    verdicts = [verifier.verify(Prompt.make("q", answer="1,000"), text) for text in ("1000.0", "999", "none")]
    assert [str(verdict.status) for verdict in verdicts] == ["correct", "wrong", "wrong"]
    assert not verifier.verify(Prompt.make("q", answer="many"), "3").known
    assert verifier.extract(Prompt.make("q"), "0.50") == verifier.extract(Prompt.make("q"), "is 0.5")


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        ("3/4", "1/4", "wrong"),
        ("3/4", "0.75", "correct"),
        ("6.626e-34", "1.6e-19", "wrong"),
        ("6.626e-34", "0", "wrong"),
        ("6.626e-34", "6.6260001e-34", "correct"),
        ("0", "1e-9", "correct"),
    ],
)
def test_fractions_and_small_numbers_are_compared_by_value(answer, text, status):
    assert NumericVerifier().verify(Prompt.make("q", answer=answer), text).status == status


@pytest.mark.parametrize(
    ("text", "value", "alone"),
    [
        (' {"a": [1]} ', {"a": [1]}, True),
        ('first {"a": 1} then {"b": {"c": 2}} end', {"b": {"c": 2}}, False),
        ('```json\n{"a": 1}\n```\nnot {"b": 2}', {"a": 1}, False),
        ("[1, 2]", [1, 2], True),
    ],
)
def test_json_is_found_in_answers(text, value, alone):
    found = find_json(text)
    assert (found.value, found.alone) == (value, alone)


def test_objects_alone_are_found_and_may_break_lines_within_strings_where_that_is_asked():
    text = 'I think {x}.\n{"a": "one\ntwo"}\nas in [1]'
    assert find_json(text).value == [1]
    assert find_json(text, opening="{", strict=False).value == {"a": "one\ntwo"}
    assert find_json(text, opening="{") is None


@pytest.mark.parametrize("text", ["", "42", '"text"', '{"a": NaN}', '{"a": 1', "[" * 100_000])
def test_what_is_no_json_answer_is_not_found(text):
    assert find_json(text) is None


def test_json_is_found_behind_a_fence_that_never_ends():
    """An answer that degenerates into line breaks: with one search for the fence's end from each, it took minutes."""
    assert find_json("```json" + "\n" * 150_000 + '{"a": 1}').value == {"a": 1}


def test_json_is_held_against_the_schema_of_the_prompt():
    verifier, prompt = JsonVerifier(), Prompt.make("q", extra={"schema": SCHEMA})
    verdicts = [verifier.verify(prompt, text) for text in ('so {"a": 1}', '{"a": "x"}', "none")]
    assert [str(verdict.status) for verdict in verdicts] == ["correct", "wrong", "wrong"]
    assert "a: 'x' is not of type 'integer'" in verdicts[1].reason
    assert not verifier.verify(Prompt.make("q"), "{}").known
    assert verifier.extract(prompt, '{"b": 1, "a": 2}') == verifier.extract(prompt, 'so {"a": 2, "b": 1}')
