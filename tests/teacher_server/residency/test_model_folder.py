"""What a model's folder says before anything is built of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from opd.errors import ConfigError
from teacher_server.residency.model_folder import MAX_CONFIG_BYTES, check_plausible, local_folder, weight_bytes

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 4,
}


def write(folder: Path, **config: Any) -> Path:
    """A folder with the tensors of `CONFIG`, and that config with some keys replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": np.zeros((50, 8), np.float32)}
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.weight"] = np.zeros((16, 8), np.float32)
        tensors[f"model.layers.{layer}.attention.weight"] = np.zeros((8, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def test_a_config_that_fits_its_tensors_passes(tmp_path: Path) -> None:
    check_plausible(write(tmp_path / "m"))
    check_plausible(write(tmp_path / "m", text_config={"num_hidden_layers": 2}, tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"n_layer": 10**9}, "n_layer 1000000000"),
        ({"num_layers": 6}, "num_layers 6, but its files hold 5 tensors"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers"),
        ({"num_decoder_layers": 10**9}, "num_decoder_layers"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000 x hidden_size 8"),
        ({"hidden_size": 10**7}, "hidden_size 10000000"),
        ({"intermediate_size": 10**10}, "intermediate_size"),
        ({"head_dim": 10**10}, "head_dim"),
        ({"num_attention_heads": 10**10}, "num_attention_heads"),
        ({"num_experts": 10**9, "moe_intermediate_size": 4}, "num_experts"),
        ({"n_routed_experts": 10**9}, "n_routed_experts"),
        ({"n_positions": 10**9, "n_embd": 8}, "n_positions"),
    ],
)
def test_a_config_that_cannot_be_true_is_refused_with_the_key_and_the_value(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is inconsistent") as caught:
        check_plausible(write(tmp_path / "m", **wrong))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\ud800".encode("utf-8", "surrogatepass"), b"\xff\xfe"])
def test_a_damaged_config_is_refused(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        check_plausible(tmp_path)


def test_a_config_too_large_to_be_one_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)  # takes no space on the disk
    with pytest.raises(ConfigError, match="too many for a config"):
        check_plausible(tmp_path)


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (5).to_bytes(8, "little") + b"{]", b"\x02\0\0\0\0\0\0\0[]"])
def test_damaged_tensors_are_left_to_the_engine(header: bytes, tmp_path: Path) -> None:
    write(tmp_path, num_hidden_layers=10**9)
    (tmp_path / "model.safetensors").write_bytes(header)
    check_plausible(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("gone")], ids=["pipe", "link to nothing"])
def test_files_that_would_hang_or_are_not_there_are_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    make(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"weights file \S*/model\.safetensors is"):
        check_plausible(tmp_path)


def test_a_folder_without_config_or_tensors_is_left_to_the_engine(tmp_path: Path) -> None:
    check_plausible(tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1000000000}')
    check_plausible(tmp_path)
    check_plausible(tmp_path / "none")


@pytest.mark.parametrize("model", ["/tmp/" + "x" * 300, "~nosuchuser/model", "a/" + "y" * 5000])
def test_a_path_that_cannot_exist_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        local_folder(model)


@pytest.mark.parametrize("model", ["no/such-model", "none", "", "a\0b", "\udcff"])
def test_what_is_no_folder_has_none(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert local_folder(model) in (None, Path(""))


def test_a_folder_counts_its_safetensors(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(100))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(5))
    (tmp_path / "config.json").write_bytes(bytes(50))
    assert local_folder(str(tmp_path)) == tmp_path
    assert weight_bytes(tmp_path) == 105


def test_a_hub_id_counts_its_cached_snapshot_and_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commit, blob = tmp_path / "models--org--model", "a" * 40, tmp_path / "blob"
    blob.write_bytes(bytes(1000))
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)  # as the hub's cache does
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    found = local_folder("org/model")
    assert found is not None and weight_bytes(found) == 1000
    assert local_folder("org/other") is None
