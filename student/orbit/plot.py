"""The figure of a fusion: accuracy over tokens, a line per mode from the merge to the student, and the teachers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]


def plot_modes(modes: Sequence[str], stages: Mapping[str, Path], fusion: Path, out: Path) -> None:
    """Write a PNG; none where no stage was evaluated.

    Args:
        modes: in order of budget; those without a stage, which are never trained, are dashed.
        stages: run folder of each trained mode's stage.
        fusion: the fusion's.
        out: the file.
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
    """(tokens, accuracy) of a mode in the evaluations of a run, from before its first step to after its last."""
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
