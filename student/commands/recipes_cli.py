"""`opd recipes list` and `opd recipes show NAME`: list and print the recipes that ship with the package.

With them are the files of the first hour on a GPU: expected figures, and the script that prepares prompts.
"""

import ast
import json
import re
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

from opd.errors import ConfigError
from opd.printable import echo
from opd.registry import hint

app = typer.Typer(no_args_is_help=True, help="List the recipes that come with opd, or print one to start from.")


def recipe_files() -> dict[str, Path]:
    """The path of every file by name: from the checkout that the code runs in, or else from the installed wheel.

    A recipe is named without .yaml, and those of the first hour with the folders that they are in.
    """
    checkout = Path(__file__).resolve().parents[2] / "examples"
    folder = checkout if checkout.is_dir() else Path(sysconfig.get_path("data")) / "share" / "opd"
    found = {path.stem: path for path in sorted((folder / "recipes").glob("*.yaml"))}
    beside = [*(folder / "first-hour").glob("*/*.*"), *folder.glob("prepare_prompts.py")]
    return found | {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in sorted(beside)}


def title(text: str, kind: str = ".yaml") -> str:
    """What a file says of itself first, without its full stop: in comments, in a docstring, or as "about" in JSON."""
    if kind == ".json":
        said = str(json.loads(text).get("about", ""))
    elif kind == ".py":
        said = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        said = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    return re.split(r"(?<=\.)\s", said, maxsplit=1)[0].rstrip(".")


@app.command("list")
def list_recipes() -> None:
    """List the recipes, each with the first sentence of its comment."""
    from opd.console import Console, Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is"):
        table.add_column(column)
    for name, path in recipe_files().items():
        table.add_row(name, title(path.read_text(encoding="utf-8"), path.suffix))
    Console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="Name of a recipe from `opd recipes list`.")]) -> None:
    """Print a recipe. `opd recipes show demo > recipe.yaml` starts one of your own."""
    files = recipe_files()
    if name not in files:
        raise ConfigError(f"there is no recipe {name!r}; {hint(name, files)}")
    echo(files[name].read_text(encoding="utf-8"), nl=False)
