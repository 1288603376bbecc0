"""A model that can only be a path, and is missing, is refused by every command that takes one, without the hub."""

import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from opd.errors import ConfigError, UnavailableError
from opd.model_path import refuse_missing

RECIPE = {"run": "run", "prompts": {"task": "addition"}, "teachers": {"endpoints": ["127.0.0.1:1"]}}


@pytest.fixture
def opd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call the command line in an empty folder of a machine without a network; gives the error, of exit code 2."""

    here = socket.getaddrinfo

    def no_network(host: Any, *arguments: Any, **keywords: Any) -> Any:
        if host == "127.0.0.1":  # which a server resolves to listen on it
            return here(host, *arguments, **keywords)
        raise AssertionError(f"the network was asked for {host}")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"model": {"path": "runs/first/model"}}))

    def run(*arguments: str) -> str:
        import opd.cli

        monkeypatch.setattr(sys, "argv", ["opd", *arguments])
        with pytest.raises(SystemExit) as caught:
            opd.cli.main()
        error = capsys.readouterr().err
        assert caught.value.code == 2 and "Traceback" not in error, error
        return error

    return run


@pytest.mark.parametrize(
    "command",
    [
        "train recipe.yaml",
        "train recipe.yaml --dry-run",
        "plan recipe.yaml",
        "premise recipe.yaml",
        "doctor --teacher recipe.yaml",
        "eval runs/first/model --recipe recipe.yaml",
        "answers recipe.yaml --out out.jsonl --model runs/first/model",
        "merge out runs/first/model runs/first/model",
        "serve --metrics-port -1 --model runs/first/model",
    ],
)
def test_a_folder_that_is_not_there_is_named_at_once(opd: Callable[..., str], command: str) -> None:
    error = opd(*command.split())
    assert "runs/first/model" in error and "hub" not in error.replace("or a hub id", "")


@pytest.mark.parametrize(
    "command",
    [
        "train recipe.yaml --dry-run",
        "answers recipe.yaml --out out.jsonl --model lost",
        "serve --metrics-port -1 --model teacher=lost",
    ],
)
def test_a_model_whose_file_has_lost_a_tensor_is_refused_by_every_command(
    opd: Callable[..., str], world: Path, command: str
) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"model": {"path": "lost"}}))
    shutil.copytree(world / "student", "lost")
    file = Path("lost/model.safetensors")
    save_file({name: t for name, t in load_file(file).items() if name != "model.norm.weight"}, file, {"format": "pt"})
    assert "lost has missing keys: model.norm.weight" in opd(*command.split())


@pytest.mark.parametrize(
    "model", ["/nowhere/model", "./model", "~/nowhere-at-all", "../a/b", "a/b/c", "a/b/", "a/b+c/d", "a/b c"]
)
def test_what_can_only_be_a_path_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"not exist, though .+ does;"):
        refuse_missing(model)


def test_what_may_be_an_id_is_left_to_the_hub() -> None:
    refuse_missing("Qwen/Qwen3-1.7B")


@pytest.mark.parametrize(
    "command",
    [
        "train recipe.yaml model.path=studnet",
        "plan recipe.yaml model.path=studnet",
        "eval studnet --recipe recipe.yaml",
        "serve --metrics-port -1 --model studnet",
        "serve --metrics-port -1 --model math=studnet",
        "doctor --fleet 127.0.0.1:1 --student studnet",
    ],
)
def test_a_name_without_an_owner_that_is_no_folder_is_refused_alike_by_every_command(
    opd: Callable[..., str], command: str
) -> None:
    error = opd(*command.split())
    assert "error: model 'studnet' is not a folder here, and the hub's cache has no model of that name; name a" in error


def test_a_name_without_an_owner_passes_if_the_cache_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--gpt2").mkdir()
    refuse_missing("gpt2")


def test_owner_and_name_without_a_hub_are_told_as_what_may_pass_by_student_and_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from student.model.model import load_tokenizer
    from teacher_server.engines.loading import resolve_folder

    # Tests ask no hub; a real one that cannot be reached is asked again for most of a minute.
    for module in ("opd.pretrained", "teacher_server.engines.loading"):
        monkeypatch.setattr(f"{module}.hub_is_away", lambda error: True)
    said = []
    for load in (load_tokenizer, lambda path: resolve_folder(path, None, with_code=False)):
        with pytest.raises(UnavailableError) as caught:
            load("nowhere/model")
        said.append(str(caught.value))
    assert said[0] == said[1] and "not a folder here, and the hub cannot be reached for it; try again" in said[0]


def test_a_file_in_place_of_the_models_folder_is_said_to_be_one(tmp_path: Path) -> None:
    from student.model.model import load_tokenizer

    (tmp_path / "recipe.yaml").write_text("run: a")
    with pytest.raises(ConfigError, match=r"recipe\.yaml' is a file"):
        load_tokenizer(str(tmp_path / "recipe.yaml"))


def test_a_gguf_file_is_refused_by_student_and_server_with_the_command_that_converts_it(tmp_path: Path) -> None:
    from student.model.model_path import check_model_path
    from teacher_server.engines.loading import resolve_folder

    named, unnamed = tmp_path / "model.gguf", tmp_path / "ollama-blob"
    for file in (named, unnamed):
        file.write_bytes(b"GGUF\x03")
        for load in (check_model_path, lambda path: resolve_folder(path, None, with_code=False)):
            with pytest.raises(ConfigError, match=f"GGUF file; .*opd convert {file} OUT"):
                load(str(file))


def test_what_is_there_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worlds" / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    refuse_missing("worlds/a/b")
    refuse_missing(str(tmp_path))


def test_an_id_whose_owner_is_a_folder_here_is_a_misspelt_path_unless_the_cache_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worlds").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=rf"though {tmp_path / 'worlds'} does; .* hf download worlds/demo\.$"):
        refuse_missing("worlds/demo")
    (tmp_path / "cache" / "models--worlds--demo").mkdir(parents=True)
    refuse_missing("worlds/demo")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_refuses_only_what_the_cache_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("ENDPOINT", "http://127.0.0.1:1"), ("HF_HUB_OFFLINE", False), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    with pytest.raises(UnavailableError, match=r"'Qwen/Qwen3-1\.7B' .*hub cannot be reached"):
        refuse_missing("Qwen/Qwen3-1.7B")
    assert "Retry" not in caplog.text
    (tmp_path / "models--Qwen--Qwen3-1.7B").mkdir()
    refuse_missing("Qwen/Qwen3-1.7B")


class ReadTimeout(Exception):
    """As the HTTP client's."""


@pytest.mark.parametrize("cause", [None, ReadTimeout()], ids=["refused", "slow"])
def test_a_hub_that_was_reached_is_left_to_who_loads_the_model(
    cause: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(model: str, **_: Any) -> None:
        asked.append(model)
        raise LocalEntryNotFoundError("nothing") from cause

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    refuse_missing("Qwen/Qwen3-1.7B")
    assert asked == ["Qwen/Qwen3-1.7B"]
