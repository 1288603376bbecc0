"""Compositions: what they say, what they refuse, and that following both steps gives their answer."""

import json
import re
from decimal import Decimal
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from opd.errors import ConfigError, DataError
from opd.tasks.chat import ChatFailed
from opd.tasks.rows import file_rows
from opd_zoo.compose.chat import ByChat
from opd_zoo.compose.cli import compose as compose_command
from opd_zoo.compose.compose import (
    Link,
    PairRefused,
    Problem,
    by_template,
    compose,
    compositions,
    lone_numbers,
    relation,
)

ADD = Problem("Tom has 3 apples and buys 4. How many has he?", "7", parts=("a",))
SPLIT = Problem("12 sweets are shared by 5 children and 2 dogs. How many are left?", "5", parts=("b",))


def link(second: Problem, text: str, definition: str = "Let {first} be Tom's apples.") -> Link:
    start = second.text.index(text)
    return Link(definition, (start, start + len(text)))


def test_the_second_problem_needs_the_first_ones_answer() -> None:
    made = compose(ADD, SPLIT, link(SPLIT, "12"))
    assert made.text == (
        "Tom has 3 apples and buys 4. How many has he?\n\nLet X be Tom's apples. Y is 5 more than X.\n\n"
        "Y sweets are shared by 5 children and 2 dogs. How many are left?"
    )
    assert (made.answer, made.depth, made.parts, made.hidden) == ("5", 2, ("a", "b"), ("7",))


def test_relations_are_said_in_words_and_exactly() -> None:
    assert [relation("X", "Y", Decimal(d)) for d in ("0", "2", "-0.10", "1e3")] == [
        "Y equals X.",
        "Y is 2 more than X.",
        "Y is 0.1 less than X.",
        "Y is 1000 more than X.",
    ]


@pytest.mark.parametrize(
    ("first", "second", "chosen", "reason"),
    [
        (Problem("What is 7 - 0?", "7", parts=("c",)), SPLIT, "12", "can be read"),
        (ADD, Problem("How much is X plus 9?", "1", parts=("c",)), "9", None),
        (ADD, Problem(" ".join("XYPQKMNRU") + " and 9?", "1", parts=("c",)), "9", "no symbol"),
        (ADD, Problem("How much is 9 and 1?", "10", parts=("a",)), "9", "occur in it twice"),
        (ADD, Problem("Add 2 and 14.", "16", parts=("c",)), "14", "can be read"),  # 14 is 7 more than 7
    ],
)
def test_what_fails_a_check_is_refused(first: Problem, second: Problem, chosen: str, reason: str | None) -> None:
    if reason is None:
        assert "Let Y be" in compose(first, second, link(second, chosen)).text  # another symbol is taken
        return
    with pytest.raises(PairRefused, match=reason):
        compose(first, second, link(second, chosen))


def test_only_numbers_that_stand_in_a_problem_once_are_replaced() -> None:
    text = "3 of 3 men earn 1.50 or 12 in 2kg, v4, 1,000"
    assert [text[a:b] for a, b in lone_numbers(text)] == ["1.50", "12"]
    for row, reason in (
        ({"prompt": "q", "answer": "x"}, "not a number"),
        ({"prompt": [], "answer": "1"}, "plain text"),
    ):
        with pytest.raises(PairRefused, match=reason):
            Problem.of(row)
    with pytest.raises(PairRefused, match="stands in it once"):
        by_template(ADD, Problem("why?", "1"), Random(0))


def sums(numbers: list[tuple[int, int]]) -> list[Problem]:
    return [Problem(f"How much is {a} plus {b}?", str(a + b), parts=(f"{i}",)) for i, (a, b) in enumerate(numbers)]


def solve(text: str) -> int:
    """What someone answers who does the steps one after the other."""
    known: dict[str, int] = {}
    last = 0
    for paragraph in text.split("\n\n"):
        if found := re.fullmatch(r"How much is (\w+) plus (\w+)\?", paragraph):
            last = sum(known[part] if part in known else int(part) for part in found.groups())
            continue
        symbol, step = re.fullmatch(r"Let (\w) be the answer to the problem above\. (.*)", paragraph).groups()
        known[symbol] = last
        if same := re.fullmatch(r"(\w) equals (\w)\.", step):
            known[same[1]] = known[same[2]]
        else:
            new, size, way, old = re.fullmatch(r"(\w) is (\d+) (more|less) than (\w)\.", step).groups()
            known[new] = known[old] + (int(size) if way == "more" else -int(size))
    return last


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=6), st.integers(0, 9))
def test_doing_both_steps_gives_the_answer_at_every_depth(numbers: list[tuple[int, int]], seed: int) -> None:
    easy = sums(numbers)
    twos = [made for made in compositions(easy, easy, by_template, count=5, seed=seed) if isinstance(made, Problem)]
    threes = [made for made in compositions(twos, easy, by_template, count=5, seed=seed) if isinstance(made, Problem)]
    for depth, found in ((2, twos), (3, threes)):
        for made in found:
            assert made.depth == depth == len(set(made.parts)) and solve(made.text) == int(made.answer)
            for part in made.parts[:-1]:
                assert easy[int(part)].answer not in re.findall(r"\d+", made.text)


def test_a_chat_model_names_the_link_and_is_asked_again(tmp_path: Path) -> None:
    said: list[Any] = [
        '{"definition": "Let {first} be the apples.", "number": "12"}',
        'I think {"value": "7.0", "once": true}',
    ]
    chat = ByChat(SimpleNamespace(ask=lambda messages: said.pop(0)))  # type: ignore[arg-type]
    found = chat(ADD, SPLIT, Random(0))
    assert found == Link("Let {first} be the apples.", (0, 2))
    for replies, reason in (
        (['{"definition": "Let it be.", "number": "12"}'], "no symbol"),
        (['{"definition": "Let {first} be.", "number": "99"}'], "does not occur"),
        (['{"definition": "Let {first} be.", "number": "12"}', '{"value": 8, "once": true}'], "differently"),
        (["hm"], "cannot be parsed"),
    ):
        said[:] = replies
        with pytest.raises(PairRefused, match=reason):
            chat(ADD, SPLIT, Random(0))

    def down(messages: Any) -> str:
        raise ChatFailed("away")

    with pytest.raises(PairRefused, match="no answer"):
        ByChat(SimpleNamespace(ask=down))(ADD, SPLIT, Random(0))  # type: ignore[arg-type]


def test_the_command_writes_a_table_that_a_recipe_reads(tmp_path: Path) -> None:
    import opd.cli

    opd.cli._add_verbs()
    table, out = tmp_path / "p.jsonl", tmp_path / "c.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": problem.text, "answer": problem.answer, "pass_rate": rate}
        for problem, rate in zip(sums([(1, 2), (30, 40), (500, 600)]), (1.0, 1.0, 0.4), strict=True)
    ]
    rows.append({"prompt": "why?", "answer": "because"})
    table.write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(opd.cli.app, ["compose", str(table), "--out", str(out), "--seed", "1"])
    assert done.exit_code == 0, done.output
    assert "not solved often enough: 1" in done.output and "not a number: 1" in done.output
    made = [row for _, row in file_rows(out)]
    assert made and all(row["depth"] == 2 and solve(row["prompt"]) == int(row["answer"]) for row in made)
    assert not any("500" in row["prompt"] for row in made)


def test_the_command_says_in_a_sentence_what_it_cannot_use(tmp_path: Path) -> None:
    table = tmp_path / "p.jsonl"
    table.write_text('{"prompt": "1+1", "answer": "2", "pass_rate": null}\n{"prompt": "2", "answer": "2"}')
    with pytest.raises(ConfigError, match=r"'localhost:8000' .* http"):
        compose_command(table, endpoint="localhost:8000")
    table.write_text('{"prompt": "1+1", "answer": "2", "pass_rate": "often"}')
    with pytest.raises(DataError, match=r"p\.jsonl line 1 has pass_rate 'often'"):
        compose_command(table)
