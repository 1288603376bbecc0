"""Plots a fusion: accuracy over tokens, with a line for each mode from the merge to the student, and its teacher."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]


def plot_modes(modes: Sequence[str], stages: Mapping[str, Path], fusion: Path, out: Path) -> None:
    """Write the figure as a PNG, or nothing if the fusion was not evaluated.

    Args:
        modes: names of the modes in the order of their budgets. The lines of modes without a stage are dashed.
        stages: run folder of the stage of each trained mode.
        fusion: run folder of the fusion.
        out: the output file.
    """
    paths = {mode: mode_path(fusion, mode) for mode in modes}
    if not any(paths.values()):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, mode in enumerate(modes):
        colour = f"C{index}"
        if paths[mode]:
            tokens, accuracy = zip(*paths[mode], strict=True)
            trained = mode in stages
            style = "-" if trained else "--"
            label = mode if trained else f"{mode} (never trained)"
            axes.plot(tokens, accuracy, color=colour, marker=".", linestyle=style, label=label)
            axes.plot(tokens[0], accuracy[0], color=colour, marker="o", markerfacecolor="none", markersize=9)
            axes.plot(tokens[-1], accuracy[-1], color=colour, marker="o", markersize=9)
        teacher = mode_path(stages[mode], mode)[-1:] if mode in stages else []
        for x, y in teacher:
            axes.plot(x, y, color=colour, marker="*", markersize=13, linestyle="none")
    axes.set_xlabel("tokens of an answer (ring: the merge, dot: the student, star: the mode's teacher)")
    axes.set_ylabel("accuracy within the mode's budget")
    axes.grid(alpha=0.3)
    axes.legend(title="mode")
    figure.savefig(out, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def mode_path(folder: Path, mode: str) -> Points:
    """(mean tokens, accuracy) of a mode in each evaluation of a run, from before its first step to after its last.

    Empty if the run is not finished.
    """
    if not (folder / "summary.json").exists():
        return []
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    between = [
        {key.removeprefix("mode/"): value for key, value in json.loads(line).items() if key.startswith("mode/")}
        for line in lines
    ]
    found: list[dict[str, Any]] = [_modes(summary, "before"), *between, _modes(summary, "after")]
    names = (f"tokens/{mode}", f"accuracy/{mode}")
    return [(one[names[0]], one[names[1]]) for one in found if all(name in one for name in names)]


def _modes(summary: Mapping[str, Any], name: str) -> dict[str, float]:
    return (summary.get(name) or {}).get("modes", {})
