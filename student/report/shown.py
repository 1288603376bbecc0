"""The figures that a run shows first, on its step lines, in `opd watch` and in the report: what its terms say of them.

The folder of a run keeps them in shown.json, so that its readers need neither its recipe's plug-ins nor their packages.
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from student.run.reading import read_mapping

FILE = "shown.json"
Figures = Mapping[str, tuple[str, ...]]
"""By its label on a step line, the names under which a step's metrics may hold a figure, of which the first counts."""
ALWAYS: Figures = {"reward": ("reward",), "length": ("response_length",), "gradient": ("grad_norm",)}
"""What a step line shows of every run, after the figures of its terms."""


def held(figures: Figures, names: Container[str]) -> dict[str, str]:
    """The figures that `names` hold, by label, each with its name there."""
    first = {label: next((name for name in known if name in names), None) for label, known in figures.items()}
    return {label: name for label, name in first.items() if name is not None}


def read_shown(run: Path, problems: list[str]) -> Figures:
    """The figures that the terms of a run named; none for a folder without them."""
    found: dict[str, Any] = read_mapping(run / FILE, problems, needed=False)
    return {label: tuple(map(str, names)) for label, names in found.items() if isinstance(names, list)}
