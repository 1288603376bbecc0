"""Plots an experiment: accuracy over sampled tokens and FLOPs, with a thin line per run and a thick one per arm."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from PIL import Image

_GRID = 60
_COSTS = (("tokens", "sampled tokens, probes and gates included"), ("flops", "GFLOPs, everything included"))


def plot_experiment(data: Mapping[str, Any], title: str, path: Path) -> None:
    """Write a PNG with accuracy, and reverse KL if it was measured, over both costs.

    Args:
        data: results of the experiment, as in its JSON.
        title: title of the figure.
        path: output file.
    """
    arms = [arm for arm in data["arms"] if arm["seeds"]]
    measured = any(_values(seed["curve"], "reverse_kl") for arm in arms for seed in arm["seeds"])
    rows = ["accuracy", "reverse_kl"] if measured else ["accuracy"]
    figure, axes = pyplot.subplots(
        len(rows), 2, figsize=(12, 3.9 * len(rows)), squeeze=False, sharex="col", layout="constrained"
    )
    colours = pyplot.get_cmap("tab10" if len(arms) <= 10 else "tab20")
    for i, measure in enumerate(rows):
        for j, (cost, label) in enumerate(_COSTS):
            for index, arm in enumerate(arms):
                _plot_arm(axes[i][j], arm, cost, measure, colours(index))
            axes[i][j].grid(alpha=0.3)
            axes[-1][j].set_xlabel(label)
        axes[i][0].set_ylabel("accuracy on held-out prompts" if measure == "accuracy" else "reverse KL, nats per token")
        if measure == "reverse_kl":
            axes[i][0].set_yscale("log")
            axes[i][1].set_yscale("log")
    for level, names in _levels(data["models"]):
        for axis in axes[0]:
            axis.axhline(level, color="grey", linestyle=":", linewidth=1)
            axis.annotate(names, (0.995, level), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    figure.suptitle(title)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=72)
    pyplot.close(figure)
    # With a palette the file is a quarter as large. The default way of choosing one merges the colours of thin lines.
    with Image.open(drawn) as image:
        small = image.convert("RGB").quantize(128, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _levels(models: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[float, str]]:
    """(mean accuracy, label) of the models; models too close to each other for two labels share a line."""
    found = sorted((float(np.mean([at["accuracy"] for at in by.values()])), name) for name, by in models.items() if by)
    levels: list[tuple[float, str]] = []
    for level, name in found:
        if levels and level - levels[-1][0] < 0.015:
            levels[-1] = (levels[-1][0], f"{levels[-1][1]}, {name}")
        else:
            levels.append((level, name))
    return levels


def _values(curve: Mapping[str, Sequence[float | None]], measure: str) -> list[float]:
    return [value for value in curve[measure] if value is not None]


def _plot_arm(axes: Axes, arm: Mapping[str, Any], cost: str, measure: str, colour: Any) -> None:
    lines = []
    for seed in arm["seeds"]:
        pairs = [(x, y) for x, y in zip(seed["curve"][cost], seed["curve"][measure], strict=True) if y is not None]
        if pairs:
            x, y = np.array(pairs).T
            axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.45)
            lines.append((x, y))
    if lines:
        # The mean over seeds, on the range in which all of them have values.
        grid = np.linspace(max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines), _GRID)
        mean = np.mean([np.interp(grid, x, y) for x, y in lines], axis=0)
        axes.plot(grid, mean, color=colour, linewidth=2, label=arm["title"])
