"""Write docs/methods/, a page per method, from code and scripts/method_notes.yaml: python scripts/methods_doc.py.

Formula and source come from the docstring of the module, settings from the class. What to watch, when a method fails
and which claims of the lab are about it come from the notes, for those that have any; outcomes come from the lab's own
results. The pages' lines of the navigation in mkdocs.yml are written too.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "methods"
SITE = ROOT / "mkdocs.yml"
NOTES = Path(__file__).with_name("method_notes.yaml")
DESCRIBED = re.compile(r"student\.methods\.|opd_zoo\.(distil|windows|curricula)\.")
"""Where the plug-ins are that have a page here."""
SHARED = {"weight", "weight.start", "weight.to", "weight.steps", "rows", "aggregation", "first_turns"}
"""Settings of every term of an objective."""
SHARED_TEXT = (
    "All terms also have `weight`, `aggregation`, `rows` and `first_turns`; `opd plugins show NAME` prints them with "
    "their defaults."
)


def notes() -> dict[str, dict[str, Any]]:
    """By page; a plug-in without notes has a page by its name."""
    from student.plugin.controllers import CONTROLLERS
    from student.plugin.terms import OBJECTIVES

    found: dict[str, dict[str, Any]] = yaml.safe_load(NOTES.read_text(encoding="utf-8"))
    noted = {name for note in found.values() for name in note["names"]}
    own = [entry.name for registry in (OBJECTIVES, CONTROLLERS) for entry in registry if DESCRIBED.match(entry.path)]
    return found | {name: {"title": name, "names": [name]} for name in own if name not in noted}


def plugins(names: list[str]) -> list[tuple[str, str, Any]]:
    """(name, summary, class) of plug-ins."""
    from student.plugin.controllers import CONTROLLERS
    from student.plugin.terms import OBJECTIVES

    known = {entry.name: (registry, entry) for registry in (OBJECTIVES, CONTROLLERS) for entry in registry}
    return [(name, known[name][1].summary, known[name][0].load(name)) for name in names]


def settings(plugin: Any) -> str:
    """A table of a plug-in's own settings."""
    from opd.config.reference import describe_keys

    rows = []
    term = "aggregation" in plugin.settings_type.model_fields
    for key, default, meaning in describe_keys(plugin.settings_type):
        if key != "name" and not (term and key in SHARED):
            text = meaning.replace("|", "\\|")
            rows.append(f"| `{key}` | {default if default == 'required' else f'`{default}`'} | {text} |")
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows]) if rows else "None of its own."


def claims(pattern: str) -> str:
    """The claims of the lab's results that match, each with its outcome and a link to the experiment."""
    lines: list[str] = []
    heading = ""
    for line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        outcome = cells[1] if len(cells) == 3 else ""
        if re.match("holds|does not hold|not shown|not judged|failed", outcome) and re.search(pattern, cells[0]):
            lines.append(f"| {cells[0]} | {outcome} | [{heading}](../results.md) |")
    return "\n".join(["| claim | outcome | experiment |", "| --- | --- | --- |", *lines]) + "\n" if lines else ""


def page(note: dict[str, Any]) -> str:
    """A whole page."""
    from student.plugin.controllers import Controller

    found = plugins(note["names"])
    module = inspect.getmodule(found[0][2])
    formula = inspect.getdoc(module) or ""
    where = "methods" if issubclass(found[0][2], Controller) else "objective"
    several = len(found) > 1
    tables = "\n\n".join((f"### {name}\n\n" if several else "") + settings(plugin) for name, _, plugin in found)
    lab = claims(note["lab"]) if "lab" in note else ""
    summaries = "\n".join(f"- `{name}`: {summary}" for name, summary, _ in found)
    shared = SHARED_TEXT if where == "objective" else ""
    watch = "\n".join(f"| `{metric}` | {text} |" for metric, text in note.get("watch", {}).items())
    head = "## Metrics to watch\n\n| metric | what it should do |\n| --- | --- |\n"
    fails = f"## When it fails\n\n{note['fails'].strip()}" if "fails" in note else ""
    return f"""# {note["title"]}

Written by `python scripts/methods_doc.py` from `{module.__name__.replace(".", "/")}.py`; do not edit.

{summaries}

```yaml
{note.get("example", f"{where}: [{{name: {found[0][0]}}}]").rstrip()}
```

The rest of the recipe is that of the [quick start](../quickstart.md#the-recipe).

## Mathematics

{formula}

## Settings

{tables}

{shared}

{head + watch if watch else ""}

{fails}

## What the lab found

{lab or "Nothing yet: no experiment of the lab has it as an arm."}
"""


def render() -> dict[str, str]:
    """Every page by file name."""
    return {f"{name}.md": re.sub(r"\n{3,}", "\n\n", page(note)).rstrip() + "\n" for name, note in notes().items()}


def navigation(site: str) -> str:
    """The text of mkdocs.yml with a line for each page."""
    lines = "".join(f"          - {note['title']}: methods/{name}.md\n" for name, note in notes().items())
    return re.sub(r"(?: +- .+: methods/\w+\.md\n)+", lines, site, count=1)


if __name__ == "__main__":
    SITE.write_text(navigation(SITE.read_text(encoding="utf-8")), encoding="utf-8")
    OUT.mkdir(exist_ok=True)
    pages = render()
    for path in OUT.glob("*.md"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (OUT / name).write_text(text, encoding="utf-8")
