"""docs/rl.md: every plug-in has a formula, a golden test and a line that works, and every system names what exists."""

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import yaml

from opd.config import parse_settings
from opd.plugins_cli import registries

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("rl_doc", ROOT / "scripts" / "rl_doc.py")
assert _SPEC is not None and _SPEC.loader is not None
rl_doc = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(rl_doc)


def test_every_line_of_a_recipe_is_valid_and_every_plug_in_has_golden_numbers() -> None:
    missing, seen = [], 0
    for _, registry, package in rl_doc.sections():
        for entry in (entry for entry in registry if re.match(package, entry.path)):
            cls = registry.load(entry.name)
            line = yaml.safe_load(rl_doc.example(entry.name))
            assert line["name"] == entry.name
            parse_settings(cls.settings_type, line)
            seen += 1
            if entry.name != "single" and not rl_doc.golden(entry.name, cls):
                missing.append(entry.name)
    assert not missing and seen > 90


def test_a_formula_is_shown_with_the_lines_that_continue_it() -> None:
    module = SimpleNamespace(__doc__="What.\n\n    b = 2\n    A_i = 1   if right\n          0   if wrong\n\nMore.\n")
    assert rl_doc.formula(module, "any") == ["A_i = 1  if right", "0  if wrong"]


NO_PAPER = {"reinforce", "replay"}
"""REINFORCE is older than arXiv; replay's law is that of code for robots."""


def test_every_published_plug_in_names_its_paper() -> None:
    missing = set()
    for _, registry, package in rl_doc.sections():
        for entry in (entry for entry in registry if re.match(package, entry.path)):
            plugin = registry.load(entry.name)
            if plugin.evidence != "own" and not rl_doc.papers(sys.modules[plugin.__module__], entry.name):
                missing.add(entry.name)
    assert missing == NO_PAPER


def test_what_is_not_built_is_not_offered_either() -> None:
    """What was built since has no place in the list of what is not."""
    built = {line.split(" | ")[0].split(" (")[0] for line in rl_doc.SYSTEMS.strip().splitlines()}
    missing = {line.split(" | ")[0].split(" (")[0] for line in rl_doc.NOT_BUILT.strip().splitlines()}
    assert built & missing <= {"R2-OPD"}  # another system of that name is built, which the list says


SETTINGS = (
    "first_turns",
    "divergence",
    "until",
    "rule",
    "weigh",
    "regulariser",
    "mix_by",
    "beyond",
    "importance_cap",
    "quantile",
    "importance_band",
)


def test_a_system_is_chosen_by_names_that_exist() -> None:
    known = {entry.name for registry in registries() for entry in registry}
    for line in rl_doc.SYSTEMS.strip().splitlines():
        system, how = line.split(" | ")
        names = [name for name in re.findall(r"`([a-z_0-9]+)`", how) if name not in SETTINGS]
        assert set(names) <= known, f"{system}: {set(names) - known}"
        assert names or "`" in how or "](" in how
