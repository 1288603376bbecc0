"""Draw the dashboards' panels from a Prometheus: python scripts/draw_dashboards.py URL OUT_FOLDER [MINUTES [END]].

The panels and their expressions are those of scripts/dashboards.py; a picture of each board is written. Panels without
data, such as rewards in a run that has none, are left out and named. END is a Unix time, now by default.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib.pyplot as plt

BOARDS = runpy.run_path(str(Path(__file__).parent / "dashboards.py"))
POINTS = 200
UNITS = {"percentunit": "share", "s": "seconds", "short": ""}
"""Grafana's names of units, for people."""


def ask(url: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    """The series that an expression gives over a stretch of time."""
    query = urlencode({"query": expression, "start": start, "end": end, "step": max(1.0, (end - start) / POINTS)})
    with urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:
        return list(json.load(answer)["data"]["result"])


def legend(template: str, labels: dict[str, str]) -> str:
    """The name of a series, as Grafana fills it."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(url: str, panels: list[tuple[str, str, str, str]], out: Path, start: float, end: float) -> None:
    """One board, three panels to a row."""
    found = [(panel, ask(url, panel[1], start, end)) for panel in panels]
    shown = [(panel, series) for panel, series in found if series]
    for panel, _ in (pair for pair in found if not pair[1]):
        print(f"{out.name}: no data for {panel[0]!r}")
    rows = -(-len(shown) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 2.9 * rows), layout="constrained")
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, ((title, _, names, unit), several) in zip(axes.flat, shown, strict=False):
        for series in several:
            times, values = zip(*((float(t) - start, float(v)) for t, v in series["values"]), strict=True)
            axis.plot([t / 60 for t in times], values, label=legend(names, series["metric"]) or None, linewidth=1.3)
        shown_unit = UNITS.get(unit, unit)
        axis.set_title(f"{title} ({shown_unit})" if shown_unit else title, fontsize=10, loc="left")
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, frameon=False)
    figure.supxlabel("minutes", fontsize=9)
    figure.savefig(out, dpi=70)
    plt.close(figure)


if __name__ == "__main__":
    url, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    end = float(sys.argv[4]) if len(sys.argv) > 4 else time.time()
    start = end - 60 * float(sys.argv[3] if len(sys.argv) > 3 else 30)
    for name in ("FLEET", "TRAINING"):
        draw(url, BOARDS[name], folder / f"{name.lower()}.png", start, end)
