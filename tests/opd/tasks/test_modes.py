"""Prompts asked in modes: marks, budgets, labels, and the refusal of marks that look alike."""

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.build import build_prompts
from opd.tasks.modes import ModeSettings, check_marks, mode_of, unmark
from opd.tasks.prompt import Prompt
from opd.tasks.settings import TaskSettings
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.plan import plan_step

TASK = TaskSettings(task="addition", options={"digits": 2})


def modes(**marks: object) -> dict[str, ModeSettings]:
    return {name: parse_settings(ModeSettings, raw) for name, raw in marks.items()}  # type: ignore[arg-type]


MODES = modes(long={"budget": 32, "prefix": "L"}, short={"budget": 8, "prefix": "S", "teacher": "brief", "weight": 2})


def test_training_prompts_take_the_modes_by_weight_and_carry_mark_budget_and_teacher() -> None:
    alone = build_prompts(TASK, seed=0).prompts("train", 6)
    asked = build_prompts(TASK, seed=0, modes=MODES).prompts("train", 6)
    assert [mode_of(prompt) for prompt in asked] == ["short", "long", "short"] * 2
    firsts = [prompt.text[0] for prompt in asked if prompt.text]
    assert firsts == ["S", "L", "S"] * 2
    assert [prompt.text[1:] for prompt in asked if prompt.text] == [prompt.text for prompt in alone]
    assert {(mode_of(p), p.max_new_tokens, p.teacher, p.domain) for p in asked} == {
        ("short", 8, "brief", "short"),
        ("long", 32, "long", "long"),
    }
    assert build_prompts(TASK, seed=0, modes=MODES).prompts("train", 2, start=3) == asked[3:5]


def test_held_out_problems_are_asked_in_every_mode() -> None:
    asked = build_prompts(TASK, seed=0, modes=MODES).prompts("heldout", 4)
    assert [mode_of(prompt) for prompt in asked] == ["long", "short"] * 2
    assert unmark(asked[0]).text == unmark(asked[1]).text != unmark(asked[2]).text
    assert len({prompt.uid for prompt in asked}) == 4


def test_an_answer_is_judged_as_the_unmarked_problem_asks() -> None:
    source = build_prompts(TASK, seed=0, modes=MODES)
    (prompt,) = source.prompts("train", 1)
    solution = prompt.extra["solution"]
    assert source.verify(prompt, solution).value == 1.0
    assert source.verify(prompt, "0").value == 0.0


def test_a_plan_holds_each_row_to_the_budget_of_its_mode() -> None:
    prompts = build_prompts(TASK, seed=0, modes=MODES).prompts("train", 3)
    plan = plan_step(0, prompts, samples=2, max_new_tokens=16, temperature=1.0)
    assert [row.max_new_tokens for row in plan.rows] == [8, 8, 16, 16, 8, 8]


def test_marks_go_where_the_settings_say_in_a_chat() -> None:
    prompt = Prompt.make([{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"},
                          {"role": "user", "content": "two"}])  # fmt: skip
    mode = parse_settings(ModeSettings, {"budget": 4, "prefix": "<", "suffix": ">", "system": "Be brief."})
    marked = mode.mark(prompt, "short")
    assert [(m["role"], m["content"]) for m in marked.messages or ()] == [
        ("system", "Be brief."), ("user", "one"), ("assistant", "1"), ("user", "<two>"),
    ]  # fmt: skip
    again = mode.mark(marked, "short")
    assert again == marked
    with_system = Prompt.make([{"role": "user", "content": "x"}], system="You are kind.")
    assert (mode.mark(with_system, "short").messages or ())[0]["content"] == "You are kind.\nBe brief."


def test_every_teacher_is_known_before_the_first_step() -> None:
    assert build_prompts(TASK, seed=0, modes=MODES).labels() == {("long", "long"), ("brief", "short")}


def test_marks_that_look_alike_are_refused_by_name() -> None:
    (prompt,) = build_prompts(TASK, seed=0).prompts("train", 1)
    tokenizer = make_tokenizer()
    check_marks(MODES, prompt, tokenizer)
    same = modes(a={"budget": 4, "prefix": "L"}, b={"budget": 8, "prefix": "L"})
    with pytest.raises(ConfigError, match=r"mode 'a' .*same ids .*'b'"):
        check_marks(same, prompt, tokenizer)
    begins = modes(a={"budget": 4, "suffix": "1"}, b={"budget": 8, "suffix": "12"})
    with pytest.raises(ConfigError, match=r"mode 'a' is the beginning .*mode 'b'"):
        check_marks(begins, prompt, tokenizer)
    begun = modes(a={"budget": 4, "prefix": "L"}, b={"budget": 8, "prefix": "Long:"})
    with pytest.raises(ConfigError, match=r"mark of mode 'a' .*beginning .*'b'"):
        check_marks(begun, prompt, tokenizer)
    # What is never trained may be asked by two marks at once.
    check_marks(modes(a={"budget": 4, "prefix": "L"}, b={"budget": 8, "prefix": "LM", "weight": 0}), prompt, tokenizer)


def test_modes_of_which_none_is_trained_are_refused() -> None:
    with pytest.raises(ConfigError, match="modes a all have weight 0"):
        build_prompts(TASK, seed=0, modes=modes(a={"budget": 4, "prefix": "L", "weight": 0}))


def test_a_mode_without_a_mark_and_a_system_text_for_plain_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a mark"):
        modes(a={"budget": 4})
    (prompt,) = build_prompts(TASK, seed=0).prompts("train", 1)
    with pytest.raises(ConfigError, match=r"plain text; .*chat: true"):
        modes(a={"budget": 4, "system": "Be brief."})["a"].mark(prompt, "a")
