"""Plain functions as rewards and verifiers: what they may return, and what a broken one costs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks import FileSettings, build_prompts
from opd.tasks.prompt import Prompt
from student.data.outcome import reward_of
from student.plugin.terms import build_terms
from student.rl.rewards.function import FunctionReward, FunctionSettings
from student.settings.recipe import Recipe

FUNCTIONS = """
import time

def score(prompt, answer):
    if answer == "hang":
        time.sleep(3600)
    if answer == "raise":
        raise ValueError("no")
    if answer == "text":
        return "much"
    if answer == "nan":
        return float("nan")
    return {"none": None, "yes": True, "no": False}.get(answer, -len(answer) * prompt.extra.get("factor", 1))

def alone(answer):
    return 1.0
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FunctionReward]]:
    (tmp_path / "scores_of_a_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[FunctionReward] = []

    def make(**settings: Any) -> FunctionReward:
        data = {"name": "function", "function": "scores_of_a_test:score", **settings}
        made.append(FunctionReward(parse_settings(FunctionSettings, data)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def test_a_function_gives_any_number_a_bool_or_nothing(
    build: Callable[..., FunctionReward], make_row: Any, services: Any
) -> None:
    rows = [make_row(text) for text in ("yes", "no", "none", "abcde")]
    reward = build(weight=2.0)
    reward.check(None, [])  # type: ignore[arg-type]
    reward.reward(rows, services)
    assert [row.reward for row in rows] == [2.0, 0.0, None, -10.0]
    assert reward.fired["unknown"] == (1.0, 4.0)


def test_a_function_sees_the_columns_of_the_prompt(
    build: Callable[..., FunctionReward], make_row: Any, services: Any
) -> None:
    row = make_row("abc", prompt=Prompt.make([{"role": "user", "content": "q"}], extra={"factor": 10}))
    build().reward([row], services)
    assert row.reward == -30.0


def test_a_function_can_add_to_the_verdict(build: Callable[..., FunctionReward], make_row: Any, services: Any) -> None:
    row, unknown = make_row("ab", 1.0), make_row("none", 1.0)
    reward = build(adds=True)
    assert reward.kind == "part" and reward.needs().reward == "verdict"
    reward.reward([row, unknown], services)
    assert (reward_of(row), reward_of(unknown)) == (-1.0, 1.0)


def test_a_call_that_hangs_or_fails_is_unknown_and_disturbs_no_other(
    build: Callable[..., FunctionReward], make_row: Any, services: Any
) -> None:
    texts = ["hang", "raise", "text", "nan", "yes", "abc"]
    rows = [make_row(text) for text in texts]
    build(timeout=3.0).reward(rows, services)
    assert [row.reward for row in rows] == [None, None, None, None, 1.0, -3.0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("scores_of_a_test", "must have the form"),
        ("scores_of_a_test:missing", "cannot be imported"),
        ("no_such_module:score", "cannot be imported"),
        ("breaks_on_import:score", r"cannot be imported: ZeroDivisionError: .*breaks_on_import\.py, line 2"),
        ("is_no_python:score", r"cannot be imported: SyntaxError: .*is_no_python\.py, line 1"),
        ("scores_of_a_test:alone", "cannot be called with a prompt and an answer"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(
    build: Callable[..., FunctionReward], path: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("\n1 / 0\n")
    (tmp_path / "is_no_python.py").write_text("def score(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        build(function=path).check(None, [])  # type: ignore[arg-type]


def test_a_function_is_accepted_as_a_verifier(build: Callable[..., FunctionReward], tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "q"}\n{"prompt": "r"}\n')
    source = build_prompts(FileSettings(file=file, verifier="scores_of_a_test:score", heldout=0), seed=0)
    prompt = source.prompts("train", 1)[0]
    found = [source.verify(prompt, text) for text in ("yes", "no", "none", "raise")]
    source.close()
    assert [str(verdict.status) for verdict in found] == ["correct", "wrong", "unknown", "unknown"]


def test_a_weight_that_the_advantage_divides_away_is_refused(build: Callable[..., FunctionReward]) -> None:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rewards": [{"name": "function", "function": "operator:countOf"}],
    }
    recipe = parse_settings(Recipe, data)
    build(weight=2.0).check(recipe, build_terms([{"name": "rloo"}]))
    build(weight=1.0).check(recipe, build_terms([{"name": "grpo"}]))
    with pytest.raises(ConfigError, match="weight 2"):
        build(weight=2.0).check(recipe, build_terms([{"name": "grpo"}]))
