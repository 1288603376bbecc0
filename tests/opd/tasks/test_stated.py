"""Short answers are found in free text, and nothing else is taken for them."""

import pytest

from opd.errors import ConfigError
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt


def verdict(name: str, answer: str | None, text: str, **options: object) -> str:
    return load_verifier(name, 0.2, options).verify(Prompt.make("q", answer=answer), text).status


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        ("Oslo", "The capital of Norway is Oslo.", "correct"),
        ("Oslo", "the capital is oslo", "correct"),
        ("New York", "It is **New\n York**!", "correct"),
        ("Oslo", "Osloites live there", "wrong"),
        ("hot", "a photo", "wrong"),
        ("12", "5 + 7 = 12.", "correct"),
        ("12", "112", "wrong"),
        ("12", "12.5", "wrong"),
        ("5", "1,5", "wrong"),
        ("-3", "x is -3", "correct"),
        ("C++", "I like C++, really", "correct"),
        ("奥斯陆", "首都是奥斯陆。", "correct"),
        ("café", "the CAFÉ there", "correct"),
        (None, "Oslo", "unknown"),
        ("  ", "Oslo", "unknown"),
    ],
)
def test_contains_finds_the_answer_as_whole_words(answer: str | None, text: str, status: str) -> None:
    assert verdict("contains", answer, text) == status


@pytest.mark.parametrize(
    ("answer", "text", "status"),
    [
        ("B", "B", "correct"),
        ("B", "b.", "correct"),
        ("(B)", "B. The sun", "correct"),
        ("B", "Because of A, the answer is (B).", "correct"),
        ("B", "I think A. No.\nAnswer: **B**", "correct"),
        ("B", r"so \boxed{B}", "correct"),
        ("A", "A dog barks", "wrong"),
        ("A", "The answer is A, not (C)", "correct"),
        ("B", "none", "wrong"),
        ("B", "The answer is Berlin", "wrong"),
        ("Berlin", "Berlin", "unknown"),
        (None, "B", "unknown"),
    ],
)
def test_choice_reads_the_last_letter_that_is_stated(answer: str | None, text: str, status: str) -> None:
    assert verdict("choice", answer, text) == status


def test_regex_takes_the_pattern_from_the_options_or_the_answer() -> None:
    assert verdict("regex", r"^\d{3}$", "123") == "correct"
    assert verdict("regex", "osl.", "OSLO") == "correct"
    assert verdict("regex", "osl.", "OSLO", ignore_case=False) == "wrong"
    assert verdict("regex", "anything", "bonjour", pattern="bon(jour|soir)") == "correct"
    assert verdict("regex", None, "x") == verdict("regex", "(", "x") == "unknown"


def test_a_search_that_takes_too_long_is_unknown_and_a_wrong_pattern_refused() -> None:
    assert verdict("regex", "(a|a)*$", "a" * 40 + "b") == "unknown"
    with pytest.raises(ConfigError, match=r"verifier_options\.pattern '\(' is not a valid pattern"):
        load_verifier("regex", 1.0, {"pattern": "("})
