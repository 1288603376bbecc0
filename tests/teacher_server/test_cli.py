"""The command line: names of teachers, options of engines, settings."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from opd.config.text import read_options
from opd.errors import ConfigError
from teacher_server.cli import _settings, _teachers, serve
from teacher_server.settings import ServerSettings


def test_teachers_are_named_by_flag_by_name_or_by_folder(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert _teachers(["math=models/m", "code=models/c"], "") == {"math": "models/m", "code": "models/c"}
    assert _teachers(["Qwen/Qwen3-8B"], "") == {"Qwen3-8B": "Qwen/Qwen3-8B"}
    assert _teachers(["models/m"], "big") == {"big": "models/m"}
    assert _teachers([str(odd)], "") == {"a=b": str(odd)}


@pytest.mark.parametrize(
    ("models", "name"),
    [(["a/m", "b/m"], ""), (["x=a", "x=b"], ""), (["a", "b"], "n"), (["=a"], ""), (["x="], ""), (["x=a"], "y")],
)
def test_ambiguous_or_empty_names_are_refused(models: list[str], name: str) -> None:
    with pytest.raises(ConfigError):
        _teachers(models, name)


def test_engine_options_are_numbers_booleans_and_words() -> None:
    assert read_options("--engine-option", ["a=1", "b=1e-5", "c=true", "d=word", "e=x=y"]) == {
        "a": 1,
        "b": 1e-5,
        "c": True,
        "d": "word",
        "e": "x=y",
    }
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        read_options("--engine-option", ["novalue"])


def test_flags_win_over_the_file_and_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("limits: {max_k: 5, max_sequences: 7}\nhost: localhost\n")
    made = _settings(file, {"limits.max_k": 9, "port": None})
    assert (made.limits.max_k, made.limits.max_sequences, made.host) == (9, 7, "localhost")
    file.write_text("limits: {max_kk: 5}\n")
    with pytest.raises(ConfigError, match="max_k"):
        _settings(file, {})
    file.write_text("limits: 5\n")
    with pytest.raises(ConfigError, match="limits"):
        _settings(file, {"limits.max_k": 3})
    file.write_text("- a\n")
    with pytest.raises(ConfigError, match="mapping"):
        _settings(file, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        _settings(tmp_path / "none", {})
    file.write_bytes(b"host: \xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        _settings(file, {})
    file.write_text("limits: {max_k: 5}\nlimits: {max_sequences: 7}\n")
    with pytest.raises(ConfigError, match="'limits' is given twice"):
        _settings(file, {})
    file.write_text("host: 2026-99-99\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        _settings(file, {})


def test_the_settings_are_printed_without_a_model() -> None:
    app = typer.Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["--keys"])
    assert result.exit_code == 0, result.output
    lines = dict(line.split(": ", 1) for line in result.output.splitlines())
    assert lines["limits.max_k"].startswith("1024. ")
    assert {"host", "calls.max_calls", "security.tokens"} <= lines.keys()


def test_every_setting_is_documented_where_it_is_declared() -> None:
    def undocumented(model: type, path: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(path + name)
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                found += undocumented(field.annotation, f"{path}{name}.")
        return found

    assert undocumented(ServerSettings) == []
