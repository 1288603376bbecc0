"""The documentation site: every page is in it, every link leads somewhere, every key it names exists."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from opd.config.reference import describe_keys
from student.settings.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages() -> list[str]:
    """Pages of the navigation."""
    found: list[str] = []
    stack = [yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            found.append(node)
        else:
            stack += node.values() if isinstance(node, dict) else node
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(pages()) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize(
    "path",
    [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("deploy/*.md"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = path if not name else (path.parent / name).resolve()
        assert target.exists(), f"{path.name}: {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", h.lower()).strip()) for h in headings}
            assert anchor in slugs, f"{path.name}: {link}"


def test_the_keys_that_the_migration_tables_name_exist() -> None:
    known = [key for key, _, _ in describe_keys(Recipe)]
    groups = set(Recipe.model_fields)
    rows = re.findall(r"^\| .+? \| (.+) \|$", (DOCS / "migration.md").read_text(), re.MULTILINE)
    named = {
        key for row in rows for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", row) if key.split(".")[0] in groups
    }
    assert len(named) > 20
    missing = {key for key in named if not any(k == key or k.startswith(f"{key}.") for k in known)}
    assert not missing


def test_links_out_of_the_site_become_names_and_those_within_stay() -> None:
    hook = runpy.run_path(str(ROOT / "scripts" / "docs_hooks.py"))["on_page_markdown"]
    text = "[recipe](../recipe.md#train), [deploy](../../deploy/README.md)"
    below = SimpleNamespace(file=SimpleNamespace(src_uri="methods/opd.md"))
    named = "[recipe](../recipe.md#train), deploy (`deploy/README.md` in the repository)"
    assert hook(text, page=below) == named
    top = SimpleNamespace(file=SimpleNamespace(src_uri="faq.md"))
    assert hook("[deploy](../deploy/README.md)", page=top) == "deploy (`deploy/README.md` in the repository)"


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed; `make docs` builds the site in its own environment")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    assert (tmp_path / "operations" / "index.html").exists()
