"""What the files of a model folder say: which ids end a response, and that its weights are damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from opd.errors import ConfigError, UnavailableError
from opd.pretrained import read_config
from teacher_server.engines.base import TokenizerIdentity
from teacher_server.engines.loading import (
    counted_ids,
    load_model,
    load_stop_token_ids,
    load_tokenizer_identity,
    resolve_folder,
)

VOCABULARY = 260


@pytest.fixture
def stop_ids(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[int, ...]]:
    """stop_ids(text of generation_config.json, None for no such file) -> the ids read."""

    def read(generation: str | None, tokenizer: TokenizerIdentity | None = None) -> tuple[int, ...]:
        folder = tmp_path / "model"
        shutil.copytree(make_model(), folder, dirs_exist_ok=True)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (folder / "generation_config.json").write_text(generation)
        tokenizer = tokenizer or load_tokenizer_identity(folder, trust_remote_code=False)
        return load_stop_token_ids(folder, read_config(folder), tokenizer, VOCABULARY)

    return read


@pytest.mark.parametrize(
    ("listed", "expected"),
    [([9, 7], (2, 7, 9)), (7, (2, 7)), ([2], (2,)), ([], (2,)), (None, (2,)), ([600, 7], (2, 7))],
)
def test_stop_ids_are_those_of_generation_config_and_tokenizer(stop_ids, listed: object, expected: tuple) -> None:
    assert stop_ids(json.dumps({"eos_token_id": listed})) == expected


def test_without_a_generation_config_the_models_config_counts(stop_ids) -> None:
    assert stop_ids(None, TokenizerIdentity("", "", 0)) == (2,)


@pytest.mark.parametrize(("ids", "rows", "counted"), [(260, 320, 260), (320, 320, 320), (321, 320, 320), (0, 320, 320)])
def test_rows_of_a_head_count_when_the_tokenizer_has_their_id(ids: int, rows: int, counted: int) -> None:
    assert counted_ids(TokenizerIdentity("", "", ids), rows) == counted


def test_a_model_may_have_no_stop_id(stop_ids) -> None:
    assert stop_ids("{}", TokenizerIdentity("", "", 0)) == ()


def test_a_damaged_generation_config_is_named(stop_ids) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        stop_ids("{")


def test_a_folder_that_is_missing_is_refused_without_asking_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teacher_server.engines.loading._download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match="runs/first/model does not exist"):
        resolve_folder("runs/first/model", None, with_code=False)


def test_a_hub_that_cannot_be_reached_is_not_taken_for_a_model_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot the network may come late: a supervisor must start the server again."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UnavailableError, match="'a/b'"):
        resolve_folder("a/b", None, with_code=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'a/b'"):
        resolve_folder("a/b", None, with_code=False)


def test_weights_that_were_cut_off_are_named_with_what_to_do(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(make_model(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = read_config(folder)
    with pytest.raises(ConfigError, match=r"\S*\.safetensors is damaged: .*again\."):
        load_model(folder, config, torch.float32, torch.device("cpu"))
