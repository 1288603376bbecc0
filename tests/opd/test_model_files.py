"""Files that are not what their names say are refused by name, before a library reads them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from opd.errors import ConfigError
from opd.model_files import check_files, tensor_headers

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index, a config, and an unrelated file."""
    for name in ("a", "b"):
        save_file({name: torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors")
    names = {"a": "a.safetensors", "b": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_bytes(POINTER)
    return tmp_path


def replaced(name: str, by: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        by(folder / name)

    return change


def index(text: str) -> Callable[[Path], None]:
    return replaced("model.safetensors.index.json", lambda file: file.write_text(text))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link to nothing": (replaced("a.safetensors", lambda file: file.symlink_to("gone")), r"a\.safetensors .* gone,"),
    "a config that is a link to nothing": (
        replaced("config.json", lambda file: file.symlink_to("gone")),
        "config.*gone",
    ),
    "a pipe": (replaced("a.safetensors", os.mkfifo), r"a\.safetensors is not a regular file"),
    "a pipe as index": (replaced("model.safetensors.index.json", os.mkfifo), "index.json is not a regular file"),
    "a pointer": (replaced("a.safetensors", lambda file: file.write_bytes(POINTER)), r"a\.safetensors .*git lfs pull"),
    "a config that is a pointer": (replaced("config.json", lambda file: file.write_bytes(POINTER)), "config.*git lfs"),
    "a header that is cut off": (
        replaced("a.safetensors", lambda file: file.write_bytes(b"\x99" * 20)),
        r"a\.safetensors is damaged",
    ),
    "an empty file": (replaced("a.safetensors", Path.touch), r"a\.safetensors is damaged"),
    "a shard that is missing": (lambda folder: (folder / "b.safetensors").unlink(), r"b\.safetensors is missing"),
    "an index of another folder": (index('{"weight_map": {"a": "../../etc/passwd"}}'), "outside its folder"),
    "an index of something else": (index('{"weight_map": ["a"]}'), "index.json is damaged"),
    "a deep index": (index("[" * 100_000), "index.json is damaged"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(folder: Path, case: str) -> None:
    check_files(folder)
    change, said = BROKEN[case]
    change(folder)
    with pytest.raises(ConfigError, match=said):
        check_files(folder)


def test_weights_that_may_not_be_read_are_told_from_missing_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read every file
    with pytest.raises(ConfigError, match="read: Permission denied"):
        check_files(folder)


def test_links_as_in_the_hubs_cache_pass(folder: Path, tmp_path: Path) -> None:
    blob = (folder / "a.safetensors").rename(tmp_path / "blob")
    (folder / "a.safetensors").symlink_to(blob)
    check_files(folder)
    assert list(tensor_headers(folder / "a.safetensors")) == [("a", (2, 3), "BF16")]


def test_what_is_not_read_may_be_anything(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(POINTER)
    (folder / "pytorch_model.bin").write_bytes(POINTER)
    check_files(folder)
    check_files(folder / "notes.txt")
    check_files(folder / "nothing")


def test_pickles_count_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(POINTER)
    with pytest.raises(ConfigError, match="git lfs"):
        check_files(tmp_path)
