"""What a student's family cannot do is refused by a dry run and at the start, in the words of the later refusal."""

from pathlib import Path
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.family_check import check_family, check_positions
from student.job.plugins import build_plugins
from student.model.model import Weights, load_student
from student.model.turn import turn_of
from student.rollout.answering import AnsweringModel
from student.rollout.batches import check_batches
from student.settings.recipe import Recipe
from tests.support.families import tiny


def recipe(folder: Path, prompt: int = 20, answer: int = 12, **changes: Any) -> Recipe:
    data = {
        "run": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "prompts": {"task": "addition"},
        "objective": [{"name": "sft", "rows": "all"}],
        "rollout": {"max_prompt_tokens": prompt, "max_new_tokens": answer},
    }
    return parse_settings(Recipe, data | changes)


def checked(job: Recipe) -> list[str]:
    plugins, weights = build_plugins(job), Weights.of(job.model)
    check_family(plugins, job.model, weights)
    return list(check_positions(job, plugins, weights))


@pytest.mark.parametrize(
    "family", ["llama4_text", "modernbert-decoder", "mamba", "bart", "rwkv", "openai-gpt", "roberta"]
)
def test_a_family_is_refused_without_weights_as_it_would_be_with_them(tmp_path: Path, family: str) -> None:
    tiny(family).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError) as early:
        checked(recipe(tmp_path))
    with pytest.raises(ConfigError) as late:
        made = load_student(str(tmp_path / "model"), dtype="float32", attention=None, gradient_checkpointing=False)
        check_batches(made.lm, 32)
    # Two random models differ by other numbers.
    assert str(early.value).split("differ")[0] == str(late.value).split("differ")[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3_5_text", "lfm2", "jamba", "gemma2", "jetmoe"])
def test_a_family_that_is_trained_is_not_refused(tmp_path: Path, family: str) -> None:
    tiny(family, tie_word_embeddings=False).config.save_pretrained(tmp_path / "model")
    assert checked(recipe(tmp_path)) == []


@pytest.mark.parametrize(
    ("family", "key"),
    [("gpt2", "max_position_embeddings"), ("opt", "max_position_embeddings"), ("biogpt", "max_position_embeddings"),
     ("gpt_bigcode", "max_position_embeddings"), ("gptj", "max_position_embeddings"), ("mpt", "max_seq_len")],
)  # fmt: skip
def test_rows_beyond_the_positions_of_a_table_are_refused(tmp_path: Path, family: str, key: str) -> None:
    tiny(family, **{key: 32}).config.save_pretrained(tmp_path / "model")
    assert checked(recipe(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"33 tokens \(rollout.max_prompt_tokens .* at most 32;"):
        checked(recipe(tmp_path, answer=13))


def test_rows_beyond_what_rotary_positions_were_made_for_are_noted(tmp_path: Path) -> None:
    tiny("llama", max_position_embeddings=32).config.save_pretrained(tmp_path / "model")
    (note,) = checked(recipe(tmp_path, answer=13))
    assert "33 tokens" in note and "more than the 32" in note


def test_rows_whose_positions_would_depend_on_their_own_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    tiny("llama", max_position_embeddings=32, rope_parameters=rope).config.save_pretrained(tmp_path / "model")
    assert checked(recipe(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"40 tokens .* at most 32; .*positions"):
        checked(recipe(tmp_path, answer=20))


def test_positions_that_a_config_states_under_no_known_name_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opd.lengths._MOST", ())
    tiny("gpt2", max_position_embeddings=32).config.save_pretrained(tmp_path / "model")
    assert checked(recipe(tmp_path)) == []
    with pytest.raises(ConfigError, match=r"have 33 tokens .* takes at most 32; lower them"):
        checked(recipe(tmp_path, answer=13))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    lm = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    assert turn_of(lm) == 32


def test_the_context_of_the_student_as_its_own_teacher_counts(tmp_path: Path) -> None:
    tiny("gpt2", max_position_embeddings=32).config.save_pretrained(tmp_path / "model")
    own = {"teachers": {"default": "student"}, "objective": [{"name": "opd"}]}
    told = {"contexts": {"teacher": {"prompt": "{{ prompt }}", "max_tokens": 21}}}
    assert checked(recipe(tmp_path, **own)) == []
    with pytest.raises(ConfigError, match=r"33 tokens \(contexts.teacher.max_tokens"):
        checked(recipe(tmp_path, **own, **told))


def test_a_model_that_only_answers_is_refused_beyond_its_positions_too(tmp_path: Path) -> None:
    tiny("gpt2", max_position_embeddings=32).config.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"33 tokens .* at most 32;"):
        AnsweringModel.load(recipe(tmp_path, answer=13), str(tmp_path / "model"), tokenizer=object())
