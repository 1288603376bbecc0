"""`opd plugins`: what is registered, here and by other packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from opd.errors import ConfigError
from opd.plugins_cli import app
from opd.registry import first_sentence


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_every_kind_is_listed_and_one_kind_alone() -> None:
    kinds = {line.split()[0] for line in run("list").splitlines()[1:]}
    assert {"advantage", "engine", "method", "objective", "task", "verifier"} <= kinds
    assert {line.split()[0] for line in run("list", "task").splitlines()[1:]} == {"task"}


def test_a_plugin_shows_its_documentation_and_its_settings() -> None:
    out = run("show", "opd")
    assert "On-policy distillation" in out and "  k: default 64. Number k of ids per position" in out


def test_a_plugin_shows_its_formula_its_needs_and_how_it_is_known() -> None:
    out = run("show", "grpo")
    assert "    A_i = (r_i - mean r) / (std r + epsilon)" in out
    assert "needs: no teacher; rewards" in out and "evidence: text and code" in out
    assert "needs: gather(64) from the teacher" in run("show", "opd")
    assert "needs: depends on its settings" in run("show", "mask_tokens")


def test_a_setting_whose_default_alone_was_changed_keeps_its_meaning() -> None:
    assert "  aggregation: default sequence_mean. How positions are averaged" in run("show", "grpo")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("opd.tasks.arithmetic:Addition", "Sums with column sums as scratch work"),
        ("opd.registry:nothing", "Registries for everything that is chosen by name"),
        ("no_such_package.inside:Thing", ""),
        ("opd.no_such_module:Thing", ""),
        ("builtins:int", ""),
        ("", ""),
    ],
)
def test_the_first_sentence_of_a_plugin_is_read_without_importing_it(path: str, sentence: str) -> None:
    assert first_sentence(path).startswith(sentence) and bool(first_sentence(path)) == bool(sentence)


def test_a_dotted_path_shows_the_same_settings() -> None:
    by_name, by_path = run("show", "addition"), run("show", "opd.tasks.arithmetic:Addition")
    assert "digits: default 2" in by_name
    assert by_name.splitlines()[1:] == by_path.splitlines()[1:]


@pytest.mark.parametrize("name", ["opdd", "no_such_module:Thing"])
def test_what_cannot_be_found_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CliRunner().invoke(app, ["show", name], catch_exceptions=False)


def test_tasks_of_other_packages_are_listed_with_their_origin_and_used(tmp_path: Path) -> None:
    (tmp_path / "thirds.py").write_text(
        "from opd.tasks.arithmetic import Addition\n\n\nclass Thirds(Addition):\n    '''Sums of a third party.'''\n"
    )
    info = tmp_path / "thirds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[opd.tasks]\nthirds = thirds:Thirds\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def ask(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    (line,) = [line for line in ask("-m", "opd.cli", "plugins", "list", "task").splitlines() if "thirds" in line]
    assert line.split() == ["task", "thirds", *["Sums", "of", "a", "third", "party"], "thirds"]
    assert "digits: default 2" in ask("-m", "opd.cli", "plugins", "show", "thirds")
    code = (
        "from opd.tasks import *; print(build_prompts(TaskSettings(task='thirds'), seed=0).prompts('train', 1)[0].text)"
    )
    assert ask("-c", code).strip().endswith("=")
