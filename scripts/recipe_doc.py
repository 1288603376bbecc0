"""Write docs/recipe.md from the settings: python scripts/recipe_doc.py [OUT]."""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTRO = """# Every key of a recipe

The keys of a recipe with their defaults, as `opd train --keys` prints them. Keys are nested groups in YAML:
`train.steps` is written `train: {steps: ...}`. Any key can be replaced on the command line:
`opd train recipe.yaml train.steps=200`.

`prompts(file)` stands for the keys of `prompts` where it names a file. `opd plugins show NAME` prints the settings of
an objective, a method or another plug-in.

This page is written by `python scripts/recipe_doc.py` from the settings themselves; a test fails when it is out of
date.
"""


def rows() -> Iterator[tuple[str, str, str]]:
    """(key, default, meaning); sources in a mix have the keys of sources on their own and are left out."""
    from opd.config.reference import describe_keys
    from student.settings.recipe import Recipe

    for key, default, text in describe_keys(Recipe):
        if not key.startswith("prompts(mix).mix("):
            yield key, default, text


def render() -> str:
    """The whole document."""
    sections: dict[str, list[str]] = {"top level": []}
    for key, default, text in rows():
        section = key.split(".")[0] if "." in key else "top level"
        shown = default if default == "required" else f"`{default}`"
        sections.setdefault(section, []).append(f"| `{key}` | {shown} | {text.replace('|', chr(92) + '|')} |")
    head = ["| key | default | meaning |", "| --- | --- | --- |"]
    parts = ["\n".join([f"## {section}", "", *head, *lines]) for section, lines in sections.items()]
    return "\n\n".join([INTRO.rstrip(), *parts]) + "\n"


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "recipe.md"
    out.write_text(render(), encoding="utf-8")
