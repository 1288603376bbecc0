"""The recipes that ship can be listed and printed."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from opd.errors import ConfigError
from student.commands.recipes_cli import app, recipe_files, title

EXAMPLES = Path(__file__).parents[3] / "examples"
SHIPPED = EXAMPLES / "recipes"
FIRST = [path for path in sorted((EXAMPLES / "first-hour").glob("*/*")) if path.is_file()]


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*arguments], catch_exceptions=False)
    return result.output


def test_every_recipe_is_listed_with_a_sentence() -> None:
    lines = run("list").splitlines()[1:]
    first = {str(path.relative_to(EXAMPLES)).removesuffix(".yaml") for path in FIRST}
    recipes = {path.stem for path in SHIPPED.glob("*.yaml")}
    assert {line.split()[0] for line in lines} == recipes | first | {"prepare_prompts.py"} and len(first) == 9
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", list(recipe_files()))
def test_a_file_is_shown_as_it_stands(name: str) -> None:
    path = recipe_files()[name]
    assert run("show", name) == path.read_text()
    assert path.suffix != ".yaml" or yaml.safe_load(run("show", name))["run"]


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'demmo'.* 'demo'"):
        run("show", "demmo")


def test_the_title_is_the_first_sentence_of_the_comment() -> None:
    assert title("# One thing, v1.5 of it. Another.\n# More.\nrun: x\n") == "One thing, v1.5 of it"
    assert title('{"about": "A card. More."}', ".json") == title('"""A card.\n\nMore."""', ".py") == "A card"
