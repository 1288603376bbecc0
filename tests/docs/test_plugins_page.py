"""The plug-ins that docs/plugins.md writes pass the conformance suites, and train together by its recipe."""

import json
import os
import re
import sys
from pathlib import Path

import forked
import pytest
import yaml
from run_records import metrics_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
SUITES = {
    "soft_clip": "tests/student/methods/test_conformance.py",
    "ranking": "tests/student/rl/advantages/test_conformance.py",
    "brief": "tests/student/rl/rewards/test_conformance.py",
    "forgotten": "tests/opd_zoo/samplers/test_conformance.py",
    "second_try": "tests/student/rollout/test_sampling.py",
}


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
    path = [str(tmp_path), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(path)}


def test_the_examples_pass_the_conformance_suites(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", *SUITES.values(), "-k", " or ".join(SUITES), "-rA"]
    result = forked.run(command, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout
    passed = re.findall(r"^PASSED (\S+?)::.*$", result.stdout, flags=re.MULTILINE)
    least = {name: 1 if name == "second_try" else 4 for name in SUITES}
    assert all(passed.count(suite) >= least[name] for name, suite in SUITES.items()), result.stdout


def test_the_recipe_of_the_page_runs_and_every_example_acts(
    environment: dict[str, str], world: Path, tmp_path: Path
) -> None:
    (text,) = blocks("yaml")
    wanted = yaml.safe_load(text)
    run = tmp_path / "run"
    data = {
        "run": str(run),
        "model": {"path": str(world / "student")},
        "prompts": {"task": "student_plugins:Halves", "options": {"digits": 2}},
        "eval": {"prompts": 0},
        **wanted,
        "rollout": {**wanted["rollout"], "max_new_tokens": 12, "max_prompt_tokens": 32},
        "train": {**wanted["train"], "steps": 3, "learning_rate": 1e-3, "threads": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    command = [sys.executable, "-m", "opd.cli", "train", str(tmp_path / "recipe.yaml")]
    result = forked.run(command, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    lines = metrics_of(run)
    # Prompts with an odd sum earn nothing whatever is answered: they were tried again.
    assert any(line["rollout_rounds"] == 2 and line["sampled_rows"] > 16 for line in lines)
    assert all(0 < line["second_try/mixed_share"] < 1 for line in lines if line["rollout_rounds"] == 2)
    assert lines[0]["updates_divisor"] == 1 and lines[-1]["updates_divisor"] > 1
    assert lines[0]["updates"] == 4 and lines[-1]["updates"] < 4
    saved = json.loads((run / "checkpoints/step-000003/trainer/loop.json").read_text())
    assert saved["methods"]["forgotten"]["last"] and saved["methods"]["fewer_updates"]["divisor"] >= 2
    assert all("forgotten/gain" in line for line in lines)
    acted = {name for line in lines for name, value in line.items() if isinstance(value, float) and value > 0}
    assert {"brief/paid", "softened_share"} <= acted
