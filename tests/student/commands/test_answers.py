"""A model's answers to training prompts: reproducible, verified, and with their whole cost."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rows import make_row
from transformers import AutoTokenizer
from typer.testing import CliRunner

from opd.cli import app as _app  # noqa: F401  (typer's settings)
from opd.errors import ConfigError, DataError
from opd.tasks import PromptSource, TaskSettings, Verdict, build_prompts
from opd.tasks.modes import ModeSettings, asked_content
from opd.tasks.settings import FileSettings
from student.commands.answers import write_answers
from student.data.prompts import fit_prompts
from student.data.row import Row
from student.rollout.answering import AnsweringModel
from student.rollout.recorded import read_answers
from student.settings.contexts import ContextSettings
from student.settings.recipe import Recipe


@pytest.fixture
def recipe(world: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "run": "unused",
            "model": {"path": str(world / "student")},
            "prompts": {"task": "addition", "options": {"digits": 1}},
            "rollout": {"max_new_tokens": 6, "prompts_per_step": 4},
            "train": {"steps": 2},
        }
    )


@pytest.fixture
def source() -> PromptSource:
    return build_prompts(TaskSettings(task="addition", options={"digits": 1}), seed=0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_the_same_recipe_gives_the_same_file(
    world: Path, recipe: Recipe, source: PromptSource, tmp_path: Path, how: Any
) -> None:
    prompts = source.prompts("train", 5)
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in files:
        report = write_answers(recipe, source, prompts, str(world / "teacher"), path, how=how)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert report.prompts == report.answered == 5 == len(lines(files[0]))
    assert report.drawn == report.tokens == sum(line["tokens"] for line in lines(files[0]))


def test_verified_answers_stop_at_the_first_correct_draw_and_count_all(
    world: Path, recipe: Recipe, source: PromptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = list({prompt.uid: prompt for prompt in source.prompts("train", 12)}.values())[:3]
    order = {prompt.uid: i for i, prompt in enumerate(prompts)}
    asked: list[int] = []

    def verify(prompt: Any, text: str) -> Verdict:
        # The first prompt is right at once, the second at its second draw, the third never.
        asked.append(order[prompt.uid])
        return Verdict.of(asked.count(order[prompt.uid]) == order[prompt.uid] + 1 and order[prompt.uid] < 2)

    monkeypatch.setattr(source, "verify", verify)
    out = tmp_path / "answers.jsonl"
    report = write_answers(recipe, source, prompts, str(world / "teacher"), out, how="verified", draws=3)
    assert [asked.count(i) for i in range(3)] == [1, 2, 3]
    assert report.answered == 2 and report.correct == 1.0
    assert [line["prompt"] for line in lines(out)] == [prompts[0].text, prompts[1].text]
    assert lines(out)[1]["drawn"] >= lines(out)[1]["tokens"] and report.drawn > report.tokens


def test_the_best_answer_is_the_most_probable_among_equals(
    world: Path, recipe: Recipe, source: PromptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Row] = []
    answer = AnsweringModel.answer

    def watched(*arguments: Any) -> list[Row]:
        rows = answer(*arguments)
        seen.extend(rows)
        return rows

    monkeypatch.setattr(AnsweringModel, "answer", watched)
    monkeypatch.setattr(source, "verify", lambda prompt, text: Verdict.of(False))
    out = tmp_path / "answers.jsonl"
    write_answers(recipe, source, source.prompts("train", 1), str(world / "teacher"), out, how="best", draws=4)
    assert len(seen) == 4
    assert lines(out)[0]["answer"] == max(seen, key=lambda row: row.behaviour_logp.sum()).text


def test_answers_are_found_again_by_a_recipe_that_puts_a_system_message_before_its_prompts(
    world: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out = tmp_path / "problems.jsonl", tmp_path / "answers.jsonl"
    own = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "3+3="}]
    table.write_text("".join(json.dumps({"prompt": content}) + "\n" for content in ("1+1=", "2+2=", own)))
    settings = FileSettings(file=table, chat=True, system="Be short.", heldout=0)
    marks = {"long": ModeSettings(budget=8, system="Think."), "short": ModeSettings(budget=4, suffix="!")}
    monkeypatch.setattr(
        AnsweringModel,
        "answer",
        lambda self, planned, purpose: [make_row([1], key=one.key, prompt=one.prompt) for one in planned],
    )
    for modes in (None, marks):
        asked = build_prompts(settings, seed=0, modes=modes)
        prompts = asked.prompts("train", 6)
        write_answers(recipe, asked, prompts, str(world / "teacher"), out, how="greedy")
        assert {asked_content(prompt) for prompt in prompts} == read_answers(out).keys()


def test_no_verified_answer_at_all_leaves_no_file(
    world: Path, recipe: Recipe, source: PromptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "verify", lambda prompt, text: Verdict.of(False))
    with pytest.raises(DataError, match="number of draws"):
        write_answers(
            recipe, source, source.prompts("train", 2), str(world / "teacher"), tmp_path / "a.jsonl", how="verified"
        )
    assert not list(tmp_path.iterdir())


def test_the_verb_answers_the_prompts_that_a_run_without_the_long_ones_takes(
    world: Path, recipe: Recipe, tmp_path: Path
) -> None:
    from student.commands.answers_cli import answers

    problems = [f"{number}+1=" + "1+" * (40 if number % 3 == 0 else 0) for number in range(30)]
    table = tmp_path / "problems.jsonl"
    table.write_text("".join(json.dumps({"prompt": problem, "answer": "2"}) + "\n" for problem in problems))
    data = recipe.model_dump(mode="json", exclude_unset=True)
    data |= {"prompts": {"file": str(table)}, "train": {"steps": 2}}
    data["rollout"] |= {"max_prompt_tokens": 16, "long_prompts": "drop"}
    run = Recipe.model_validate(data)
    taken = build_prompts(run.prompts, seed=run.seed)
    fit_prompts(run, taken, AutoTokenizer.from_pretrained(world / "student"))
    verb = typer.Typer()
    verb.command()(answers)
    path, out = tmp_path / "recipe.yaml", tmp_path / "answers.jsonl"
    path.write_text(json.dumps(data))
    words = [str(path), "--model", str(world / "teacher"), "--out", str(out)]
    assert CliRunner().invoke(verb, words, catch_exceptions=False).exit_code == 0
    asked = [line["prompt"] for line in lines(out)]
    assert asked == [prompt.text for prompt in taken.prompts("train", 8)] and max(map(len, asked)) <= 16
    with pytest.raises(ConfigError, match=r"recipe's prompts.* overwritten"):
        CliRunner().invoke(verb, [*words[:-1], str(table)], catch_exceptions=False)
    folder = tmp_path / "dataset"
    folder.mkdir()
    path.write_text(json.dumps(data | {"prompts": {"dataset": str(folder)}}))
    with pytest.raises(ConfigError, match=r"recipe's prompts.* overwritten"):
        CliRunner().invoke(verb, [*words[:-1], str(folder / "train.jsonl")], catch_exceptions=False)


def test_the_verb_writes_a_file_and_says_what_it_cost(world: Path, recipe: Recipe, tmp_path: Path) -> None:
    from student.commands.answers_cli import answers

    verb = typer.Typer()
    verb.command()(answers)
    path, out = tmp_path / "recipe.yaml", tmp_path / "answers.jsonl"
    path.write_text(json.dumps(recipe.model_dump(mode="json", exclude_unset=True)))
    options = [str(path), "--model", str(world / "teacher"), "--out", str(out), "--prompts", "4"]
    result = CliRunner().invoke(verb, options, catch_exceptions=False)
    assert result.exit_code == 0 and "drawn" in result.output and out.is_file()
    with pytest.raises(ConfigError, match="greedy, sampled, verified, best"):
        CliRunner().invoke(verb, [*options, "--how", "worst"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="is a folder"):
        CliRunner().invoke(verb, [*options, "--out", str(tmp_path)], catch_exceptions=False)


def test_the_model_reads_the_teachers_context_and_the_file_has_the_prompt_without_it(
    world: Path, recipe: Recipe, source: PromptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, seen = source.prompts("train", 3), list[Row]()
    answer = AnsweringModel.answer
    monkeypatch.setattr(AnsweringModel, "answer", lambda *given: seen.extend(rows := answer(*given)) or rows)
    told = recipe.model_copy(update={"contexts": {"teacher": ContextSettings(prompt="1+1=2 {{ prompt }}")}})
    write_answers(told, source, prompts, str(world / "teacher"), tmp_path / "out.jsonl", how="greedy")
    tokenizer = AutoTokenizer.from_pretrained(world / "teacher")
    assert [tokenizer.decode(row.behaviour_prompt_ids) for row in seen] == [f"1+1=2 {p.text}" for p in prompts]
    assert [line["prompt"] for line in lines(tmp_path / "out.jsonl")] == [p.text for p in prompts]
    late = recipe.model_copy(update={"contexts": {"teacher": ContextSettings(prompt="{{ group.best }}")}})
    with pytest.raises(ConfigError, match=r"contexts\.teacher reads outcomes"):
        write_answers(late, source, prompts, str(world / "teacher"), tmp_path / "late.jsonl", how="greedy")
