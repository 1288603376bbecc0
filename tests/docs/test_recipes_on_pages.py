"""Every recipe that a page shows is accepted: with the quick start's for the rest, as far as no model is needed."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import self_signed

from opd.config import parse_settings
from opd.tasks import build_prompts
from student.commands.dry_run import check
from student.job.plugins import build_plugins
from student.job.prompt_check import check_prompts
from student.orbit.recipe import OrbitRecipe
from student.scoring.handshake import named_roles
from student.settings.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {"plugins.md": "test_plugins_page.py", "tiny.md": "test_tiny_page.py"}
"""Pages whose YAML another test runs."""
BASE_LINK = "quickstart.md#the-recipe"
GROUPS = ("model", "teachers", "rollout", "train")
"""Groups that an example adds to the quick start's key by key; docs/quickstart.md says so."""
WORLDS = {"textworld": "textworld", "alfworld": "textworld", "scienceworld": "scienceworld"}
"""Packages that draw the prompts of a task."""
PLAYED = {"environment": {"name": "lock", "options": {"digits": 3, "turns": 5}}, "code": "123", "path": ["1", "2", "3"]}
COLUMNS = {"rooms.jsonl": PLAYED, "boil.jsonl": PLAYED}
"""What rows of a file have besides prompt and answer, where the page says more of them."""


def blocks(page: Path) -> list[dict[str, Any]]:
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]


EVERY = [
    (page.relative_to(ROOT), number, block)
    for page in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "examples").rglob("*.md")]
    if page.name not in ELSEWHERE
    for number, block in enumerate(blocks(page))
]
ORBIT = [(page, number, block) for page, number, block in EVERY if page.name == "orbit.md"]
RECIPES = [entry for entry in EVERY if entry not in ORBIT]
(BASE,) = blocks(ROOT / "docs" / "quickstart.md")


def merged(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    groups = {key: {**base.get(key, {}), **part[key]} for key in GROUPS if key in part}
    return {**base, **part, **groups}


def names(entries: list[tuple[Path, int, dict[str, Any]]]) -> list[str]:
    return [f"{page}-{number}" for page, number, _ in entries]


@pytest.mark.parametrize(("page", "number", "block"), RECIPES, ids=names(RECIPES))
def test_every_recipe_of_a_page_is_accepted(
    page: Path, number: int, block: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = parse_settings(Recipe, merged(BASE, block) | {"eval": {"prompts": 0}})
    if recipe.rollout.engine["name"] == "vllm":
        pytest.importorskip("vllm")
    check(recipe, offline=True)
    plugins = build_plugins(recipe)
    if recipe.teachers is not None:
        said = recipe.teachers
        targets = [target for target in (said.default, said.reference, *said.routes.values()) if target is not None]
        every = [name for target in targets for name in ([target] if isinstance(target, str) else target)]
        named_roles(said, every, plugins.needs)
    write_files(recipe)
    self_signed(tmp_path, "ca")
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    package = WORLDS.get(getattr(recipe.prompts, "task", ""))
    if package is None or importlib.util.find_spec(package) is not None:
        source = build_prompts(recipe.prompts, seed=0, modes=recipe.modes)
        check_prompts(recipe, plugins, source)
        source.close()


def write_files(recipe: Recipe) -> None:
    """The files that recipes of the pages name."""
    for one in getattr(recipe.prompts, "mix", [recipe.prompts]):
        kept = dict.fromkeys(getattr(one, "keep_columns", ()), 1)
        rows = [{"prompt": f"{i} + {i} =", "answer": str(2 * i), **kept} for i in range(40)]
        file = Path(getattr(one, "file", "prompts.jsonl"))
        file.write_text("".join(json.dumps(row | COLUMNS.get(file.name, {})) + "\n" for row in rows))
    given = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]  # the prompts are chats
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))


@pytest.mark.parametrize(("page", "number", "block"), ORBIT, ids=names(ORBIT))
def test_every_part_of_an_orbit_is_accepted(page: Path, number: int, block: dict[str, Any]) -> None:
    whole = ORBIT[0][2]
    fusion = {**whole["fusion"], **block.get("fusion", {})}
    parse_settings(OrbitRecipe, {**whole, **block, "fusion": fusion})


def test_every_page_with_parts_of_a_recipe_says_where_the_rest_is() -> None:
    silent = {str(page) for page, _, _ in RECIPES if BASE_LINK not in (ROOT / page).read_text()}
    assert silent == {"docs/quickstart.md"}
    assert all(f"`{group}`" in (ROOT / "docs" / "quickstart.md").read_text() for group in GROUPS)
    for page, test in ELSEWHERE.items():
        assert page in Path(__file__).with_name(test).read_text() and (ROOT / "docs" / page).exists()
