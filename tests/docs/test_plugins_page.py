"""The plug-ins that docs/plugins.md writes pass the conformance suites and can be named in a recipe."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The package of the page, installed for processes of their own."""
    package, info = tmp_path / "my_plugins", tmp_path / "my_plugins-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").touch()
    for code in blocks("python"):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name is not None
        (package / name[1]).write_text(code)
    (toml,) = blocks("toml")
    points = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", toml).replace('"', "")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugins\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    # Not a worker of the run that this test belongs to.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    ("suite", "name", "least"),
    [
        ("tests/student/methods/test_conformance.py", "soft_clip", 8),
        ("tests/student/rl/advantages/test_conformance.py", "rank", 8),
    ],
)
def test_the_examples_pass_the_conformance_suites(
    environment: dict[str, str], suite: str, name: str, least: int
) -> None:
    command = [sys.executable, "-m", "pytest", suite, "-k", name]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert int(re.findall(r"(\d+) passed", result.stdout)[-1]) >= least


def test_the_recipe_of_the_page_names_them(environment: dict[str, str]) -> None:
    (text,) = blocks("yaml")
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "rollout": {"samples_per_prompt": 4},
        **yaml.safe_load(text),
    }
    code = (
        "from opd.config import parse_settings; from student.recipe import Recipe; "
        f"from student.plugins import build_plugins; print(build_plugins(parse_settings(Recipe, {data!r})).terms)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "SoftClip" in result.stdout, result.stderr
