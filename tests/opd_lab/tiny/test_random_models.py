"""Untrained models of a real shape, their tokenizer and their prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from opd.errors import ConfigError, DataError
from opd_lab.tiny.cli import app
from opd_lab.tiny.random_models import config_of, count_parameters, make_random_models, random_shape
from opd_lab.tiny.tokenizer import make_word_tokenizer

MODELS = ("student", "teacher")
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters of the models on the hub, a tied head counted once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small models, made by the command."""
    made = tmp_path_factory.mktemp("random") / "models"
    options = ["--scale", "0.08", "--vocabulary", "4096", "--prompts", "20", "--prompt-tokens", "17", "--seed", "3"]
    result = CliRunner().invoke(app, ["random", str(made), *options])
    assert result.exit_code == 0, result.output
    assert "20 prompts of 17 tokens" in result.output
    return made


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_the_model_it_is_named_after(name: str) -> None:
    assert count_parameters(random_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_scaled_shape_keeps_the_width_of_a_head_and_shares_heads_evenly(name: str) -> None:
    whole = random_shape(name)
    for scale in (0.01, 0.1, 0.3, 0.5, 0.77):
        small = whole.scaled(scale)
        assert small.hidden // small.heads == whole.hidden // whole.heads
        assert small.heads % small.shared_heads == 0 and small.vocabulary == whole.vocabulary
        assert small.layers == max(1, round(whole.layers * scale))
    assert whole.scaled(1.0) == whole


def test_models_load_with_plain_transformers_and_have_the_family_of_their_shape(folder: Path) -> None:
    for name in MODELS:
        model: Any = AutoModelForCausalLM.from_pretrained(folder / name)
        assert model.config.model_type == "qwen2" and model.dtype == torch.bfloat16
        assert (
            model.get_output_embeddings().weight.shape[0] == 4096 == len(AutoTokenizer.from_pretrained(folder / name))
        )
        assert model.generation_config.eos_token_id == 1
    assert config_of(random_shape("qwen3-8b")).architectures == ["Qwen3ForCausalLM"]


def test_every_prompt_has_the_wanted_tokens(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert len({line["prompt"] for line in lines}) == 20
    assert [len(tokenizer(line["prompt"])["input_ids"]) for line in lines] == [17] * 20


def test_the_same_seed_gives_the_same_files_and_another_seed_others(folder: Path, tmp_path: Path) -> None:
    shapes = [random_shape(name).scaled(0.08, 4096) for name in ("qwen2.5-0.5b", "qwen2.5-1.5b")]
    for seed in (3, 4):
        make_random_models(tmp_path / str(seed), *shapes, seed=seed, prompts=20, prompt_tokens=17)
    for file in ("student/model.safetensors", "teacher/model.safetensors", "prompts.jsonl"):
        there = (folder / file).read_bytes()
        assert (tmp_path / "3" / file).read_bytes() == there != (tmp_path / "4" / file).read_bytes()
    first = [load_file(folder / name / "model.safetensors")["model.embed_tokens.weight"][2, :64] for name in MODELS]
    assert not torch.equal(*first)


def test_what_cannot_be_made_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = random_shape("qwen3-1.7b").scaled(0.05, 1024)
    with pytest.raises(DataError, match="exists already"):
        make_random_models(folder, small, small)
    with pytest.raises(ConfigError, match="1024 and 151936 rows"):
        make_random_models(tmp_path / "x", small, random_shape("qwen3-8b"))
    with pytest.raises(ConfigError, match="'int8'; use one of float32"):
        make_random_models(tmp_path / "x", small, small, dtype="int8")
    with pytest.raises(ConfigError, match=r"shape 'qwen4' is unknown.*qwen3-8b"):
        random_shape("qwen4")
    for scale, rows, said in ((0.0, None, "scale"), (1.5, None, "scale"), (1.0, 100, "100 rows"), (1.0, 10**6, "rows")):
        with pytest.raises(ConfigError, match=said):
            random_shape("qwen3-8b").scaled(scale, rows)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with pytest.raises(DataError, match=r"would take .* but 1e-06"):
        make_random_models(tmp_path / "x", small, small)
    assert list(tmp_path.iterdir()) == []


WORDS = make_word_tokenizer(700, 512)


@given(st.text())
def test_any_text_survives_the_tokenizer_of_words(text: str) -> None:
    assert WORDS.decode(WORDS(text)["input_ids"]) == text


def test_random_answers_are_read_back_from_their_text_as_the_same_ids(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    ids = torch.randint(260, 4096, (50, 40), generator=torch.Generator().manual_seed(0)).tolist()
    assert [tokenizer(tokenizer.decode(row))["input_ids"] for row in ids] == ids
