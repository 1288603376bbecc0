"""A chat model of one's own, prompts of one's own, and the mistakes of the first hour."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_records import metrics_of
from transformers import AutoTokenizer

from opd.config import parse_settings
from opd.errors import ConfigError, DataError, OpdError, PortInUseError, RunFolderError
from student.commands.dry_run import check
from student.job.session import train
from student.report.telemetry import Telemetry
from student.settings.recipe import Recipe


@pytest.fixture(scope="module")
def chat_teacher(chat_model: Path, serve: Any) -> Any:
    return serve("--model", f"teacher={chat_model}")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"What is {i} + 1?", "answer": str(i + 1)}) + "\n" for i in range(60))
    )
    return path


@pytest.fixture
def chat(chat_model: Path, chat_teacher: Any, questions: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe for the chat model; groups given replace keys of it."""

    def make(**changes: Any) -> Recipe:
        data = {
            "run": str(tmp_path / "run"),
            "model": {"path": str(chat_model)},
            "teachers": {"endpoints": [chat_teacher.address]},
            "prompts": {"file": str(questions), "chat": True, "heldout": 0.2, "verifier": "numeric"},
            "rollout": {"prompts_per_step": 4, "max_new_tokens": 16, "max_prompt_tokens": 100},
            "objective": [{"name": "opd", "payload": "gather", "k": 8}],
            "train": {"steps": 1, "threads": 1},
            "eval": {"prompts": 4},
        }
        for key, value in changes.items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value  # type: ignore[dict-item]
        return parse_settings(Recipe, data)

    return make


def test_the_dry_run_shows_stop_tokens_and_one_prompt_as_both_sides_read_it(
    chat: Callable[..., Recipe], chat_model: Path
) -> None:
    options = {"system": "Be brief.", "template_options": {"enable_thinking": False}}
    text = check(chat(prompts=options), offline=False)
    assert "'<|im_end|>' (id 2, from tokenizer and generation_config), '<|endoftext|>' (id 0, from gen" in text
    (line,) = [line for line in text.splitlines() if line.startswith("first prompt, ")]
    assert "<s><|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nWhat is " in line
    assert line.endswith("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'") and line.count("<s>") == 1
    first = AutoTokenizer.from_pretrained(chat_model).bos_token_id
    assert f"ids [{first}, 1, " in text and "teacher reads the same ids" in text


def test_a_teacher_with_another_chat_template_is_said_to_read_the_students(
    chat: Callable[..., Recipe], chat_model: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    other = tmp_path / "other"
    for file in chat_model.iterdir():
        (other / file.name).parent.mkdir(exist_ok=True)
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(other)
    text = check(chat(model={"path": str(other)}), offline=False)
    assert "teacher reads the same ids; its own chat template (" in text


def test_a_misspelt_template_option_is_refused(chat: Callable[..., Recipe]) -> None:
    with pytest.raises(DataError, match=r"'enable_thinkin'.* never reads"):
        check(chat(prompts={"template_options": {"enable_thinkin": False}}), offline=False)


def test_training_and_evaluation_end_at_every_stop_token(chat: Callable[..., Recipe], chat_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    everything = list(range(len(tokenizer)))
    summary = train(chat(rollout={"stop_tokens": everything}, eval={"temperature": 1.0}))
    assert summary["response_tokens"] == 4
    assert summary["before"]["mean_length"] == 1 and summary["before"]["truncated"] == 0


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize("long_prompts", ["error", "drop"])
def test_long_prompts_are_found_before_the_run(
    chat: Callable[..., Recipe], questions: Path, long_prompts: str, dry: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with questions.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 200, "answer": "1"}) + "\n")
    recipe = chat(rollout={"long_prompts": long_prompts}, train={"steps": 1})

    def start() -> object:
        return check(recipe, offline=False) if dry else train(recipe)

    if long_prompts == "error":
        with pytest.raises(DataError, match=r"questions\.jsonl line 61 .*2\d\d tokens.* 100"):
            start()
        assert not recipe.run.exists()
    else:
        start()
        assert "more than 100 tokens were left out: 1" in caplog.text


def test_the_dry_run_shows_what_matters_first_and_the_whole_recipe_where_it_is_asked_for(
    chat: Callable[..., Recipe],
) -> None:
    short, long = (check(chat(), offline=True, whole=whole) for whole in (False, True))
    assert short.startswith("needs: ") and long.startswith(short)
    assert "learning_rate:" not in short and "learning_rate:" in long


def test_the_dry_run_finds_a_run_folder_that_cannot_be_made(chat: Callable[..., Recipe]) -> None:
    with pytest.raises(RunFolderError, match="/proc/opd/run cannot be written"):
        check(chat(run="/proc/opd/run"), offline=True)


def test_the_dry_run_finds_a_taken_metrics_port(chat: Callable[..., Recipe]) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for attempt in (lambda recipe: check(recipe, offline=True), train):
            with pytest.raises(PortInUseError, match=str(port)):
                attempt(chat(metrics_port=port))


def test_the_dry_run_says_that_no_answer_can_be_judged(chat: Callable[..., Recipe], questions: Path) -> None:
    assert "accuracy will be unknown" not in check(chat(), offline=False)
    questions.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(60)))
    assert "no held-out prompt has a reference answer, so accuracy will be unknown" in check(chat(), offline=False)


def test_samples_show_what_was_asked_and_answered_at_evaluations_and_in_training(chat: Callable[..., Recipe]) -> None:
    changes = {"train": {"steps": 4, "checkpoint_every": 1, "threads": 1}, "samples": {"every": 2, "count": 3}}
    recipe = chat(**changes, eval={"every": 3}, objective=[{"name": "opd", "payload": "sampled"}])
    train(recipe)
    lines = (recipe.run / "samples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    kinds = [(line["step"], line["label"]) for line in found]
    expected = [(0, "before"), (2, "train"), (3, "step 3"), (4, "train"), (4, "after")]
    assert kinds == [kind for kind in expected for _ in range(3)]
    for line in found:
        assert line["prompt"][-1]["content"].startswith("What is ") and line["reference"].isdigit()
        assert isinstance(line["answer"], str) and 1 <= line["tokens"] <= 16 and line["kl"] is not None
        assert (line["verdict"] in ("correct", "wrong")) == (line["label"] != "train")
    metrics = metrics_of(recipe.run)
    assert all(0 <= step["repetition"] < 1 for step in metrics) and "eval/repetition" in metrics[2]
    resumed = chat(**{**changes, "train": {**changes["train"], "steps": 5}}, eval={"every": 3})
    train(resumed, resume=True)
    again = [json.loads(line) for line in (recipe.run / "samples.jsonl").read_text().splitlines()]
    assert [line["label"] for line in again].count("after") == 3 and again[:12] == found[:12]


def test_the_estimator_of_the_divergence_is_named_in_line_and_summary(
    chat: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(chat(eval={"samples": 2, "temperature": 1.0}))
    line = next(line for line in capsys.readouterr().err.splitlines() if "evaluation (before)" in line)
    assert "nats per token (exact)" in line and "pass@2 0.000" in line and "±" in line
    assert summary["before"]["reverse_kl_estimator"] == "exact" and set(summary["after"]["pass_at"]) == {"1", "2"}


def test_a_start_that_fails_before_the_first_step_leaves_no_folder(
    chat: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = chat()
    monkeypatch.setattr(Telemetry, "start", lambda self, *_: (_ for _ in ()).throw(ConfigError("no terminal.")))
    with pytest.raises(OpdError, match=r"no terminal\. .*0 of 1 steps"):
        train(recipe)
    assert not recipe.run.exists()
    monkeypatch.undo()
    assert train(recipe)["steps"] == 1
    assert yaml.safe_load((recipe.run / "recipe.yaml").read_text())["rollout"]["long_prompts"] == "error"
