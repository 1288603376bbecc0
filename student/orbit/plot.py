"""Plots a fusion: accuracy over tokens, with a line for each mode from the merge to the student, and its teacher."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.files import write_whole
from student.report.page.chart import picture

Points = list[tuple[float, float]]


def plot_modes(modes: Sequence[str], stages: Mapping[str, Path], fusion: Path, out: Path) -> None:
    """Write the figure as an SVG, or nothing if the fusion was not evaluated.

    Args:
        modes: names of the modes in the order of their budgets. The legend says which have no stage.
        stages: run folder of the stage of each trained mode.
        fusion: run folder of the fusion.
        out: the output file.
    """
    if not any(mode_path(fusion, mode) for mode in modes):
        return
    series = []
    for colour, mode in enumerate(modes):
        paths = {f"{mode}, from the merge to the student": mode_path(fusion, mode)}
        if mode in stages:
            paths[f"{mode}, the mode's teacher"] = mode_path(stages[mode], mode)[-1:]
        else:
            paths = {f"{name} (never trained)": points for name, points in paths.items()}
        for name, points in paths.items():
            if points:
                x, y = zip(*points, strict=True)
                series.append({"name": name, "x": x, "y": y, "half": None, "colour": colour})
    chart = {"title": "Accuracy within each mode's budget over tokens of an answer", "series": series}
    write_whole(out, picture(chart, "tokens of an answer"))


def mode_path(folder: Path, mode: str) -> Points:
    """(mean tokens, accuracy) of a mode in each evaluation of a run, from before its first step to after its last.

    Empty if the run is not finished.
    """
    if not (folder / "summary.json").exists():
        return []
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    until = [
        {key.removeprefix("mode/"): value for key, value in json.loads(line).items() if key.startswith("mode/")}
        for line in lines
    ]
    found: list[dict[str, Any]] = [*until, (summary.get("after") or {}).get("modes", {})]
    names = (f"tokens/{mode}", f"accuracy/{mode}")
    return [(one[names[0]], one[names[1]]) for one in found if all(name in one for name in names)]
