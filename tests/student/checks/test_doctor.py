"""`opd doctor --teacher` and `--self-test` on real servers."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.doctor.finding import examination
from opd.errors import ConfigError
from opd_lab.self_test import examine_payloads
from student.checks.teacher import examine_teacher, measure
from student.settings.recipe import Recipe


@pytest.fixture
def make_recipe(world: Path, teacher: Any) -> Callable[..., Recipe]:
    def make(default: str = "teacher", **more: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "run": "unused",
                "model": {"path": str(world / "student")},
                "teachers": {"endpoints": [teacher.address], "default": default},
                "prompts": {"task": "addition"},
                "rollout": {"max_new_tokens": 12, "max_prompt_tokens": 64},
                "train": {"threads": 1},
                **more,
            }
        )

    return make


def test_a_student_that_is_its_own_teacher_gets_nothing_and_the_chain_is_exact(world: Path, teacher: Any) -> None:
    findings = list(examine_payloads(world / "student", teacher.address, "student", "teacher"))
    assert [finding.level for finding in findings] == ["ok"] * 4, findings
    swapped = next(examine_payloads(world / "student", teacher.address, "teacher", "student"))
    assert swapped.level == "fail" and "something in the chain is wrong" in swapped.text, "the test is not blind"


def test_student_and_teacher_answer_the_same_prompts_and_are_compared(make_recipe: Callable[..., Recipe]) -> None:
    ((name, worth, obstacle),) = measure(make_recipe(), prompts=8)
    assert (name, obstacle) == ("teacher", "")
    assert worth.parity < 1e-4, "the weights that answer here are those that are served"
    assert worth.better is not None and worth.rescue is not None and worth.slope is not None
    assert worth.prompts == worth.better.count and worth.answers == 4 * worth.prompts
    assert worth.reverse_kl > 0.1 and 0 < worth.overlap < 1 and 0 < worth.mass < 1
    ((_, same, _),) = measure(make_recipe("student"), prompts=8)
    assert same.overlap == same.first == 1.0 and abs(same.reverse_kl) < 1e-4
    assert same.slope is not None and abs(same.slope.mean) < 1e-4


def test_another_context_is_what_the_teacher_reads_here_too(make_recipe: Callable[..., Recipe]) -> None:
    hinted = make_recipe(contexts={"teacher": {"prompt": "{{ prompt }}{{ answer }}"}})
    ((_, worth, _),) = measure(hinted, prompts=8)
    assert worth.parity < 1e-4, "parity is taken under the context"


def test_a_teacher_without_weights_here_is_judged_by_its_scores_alone(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("there is no such folder")

    monkeypatch.setattr("student.rollout.answering.load_student", refuse)
    ((_, worth, obstacle),) = measure(make_recipe(), prompts=8)
    assert "no such folder" in obstacle and worth.better is None and math.isnan(worth.parity)
    assert worth.slope is not None
    with pytest.raises(ConfigError, match="some/where"):
        next(measure(make_recipe(), model="some/where", prompts=8))


def test_the_verb_finds_the_examinations_and_says_what_cannot_be_examined(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    assert examination("teacher") is examine_teacher
    assert examination("self-test").__name__ == "examine_chain"
    with pytest.raises(ConfigError, match="lacks the check 'x'"):
        examination("x")
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(make_recipe().model_dump(mode="json", exclude_unset=True)))
    findings = list(examine_teacher(path, ["rollout.max_new_tokens=8"], prompts=8))
    assert findings[-1].text.split(":")[0] in ("distil", "do not distil", "not enough evidence")
    with pytest.raises(ConfigError, match="is the student itself"):
        next(examine_teacher(path, ["teachers.default=initial"], prompts=8))
    with pytest.raises(ConfigError, match="names no teachers"):
        next(measure(make_recipe().model_copy(update={"teachers": None})))
