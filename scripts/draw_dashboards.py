"""Draw the dashboards' panels from a Prometheus: python scripts/draw_dashboards.py URL OUT_FOLDER [--minutes 30].

The panels and their expressions are those of scripts/dashboards.py; a picture of each board is written. Panels without
data, such as rewards in a run that has none, are left out and named.
"""

import argparse
import json
import runpy
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import matplotlib.pyplot as plt

BOARDS = runpy.run_path(str(Path(__file__).parent / "dashboards.py"))
POINTS = 200
UNITS = {"percentunit": "share", "s": "seconds", "reqps": "calls per second", "short": ""}
"""Grafana's names of units, and what a picture says instead."""


def ask(url: str, expression: str, start: float, end: float) -> list[dict[str, Any]]:
    """The series of an expression between two Unix times."""
    query = urlencode({"query": expression, "start": start, "end": end, "step": max(1.0, (end - start) / POINTS)})
    with urlopen(f"{url}/api/v1/query_range?{query}", timeout=30) as answer:
        return list(json.load(answer)["data"]["result"])


def legend(template: str, labels: dict[str, str]) -> str:
    """The name of a series: the template with its labels filled in, as in Grafana."""
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def draw(url: str, panels: list[tuple[str, str, str, str]], out: Path, start: float, end: float, window: str) -> None:
    """One board, three panels to a row, between two Unix times."""
    found = [(panel, ask(url, BOARDS["plain"](panel[1], window), start, end)) for panel in panels]
    shown = [(panel, series) for panel, series in found if series]
    for panel, _ in (pair for pair in found if not pair[1]):
        print(f"{out.name}: no data for {panel[0]!r}")
    rows = -(-len(shown) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(15, 2.9 * rows), layout="constrained")
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, (panel, several) in zip(axes.flat, shown, strict=False):
        draw_panel(axis, panel, several, start)
        axis.set_xlim(0, (end - start) / 60)
    figure.supxlabel("minutes", fontsize=9)
    figure.savefig(out, dpi=70)
    plt.close(figure)


def draw_panel(axis: Any, panel: tuple[str, str, str, str], several: list[dict[str, Any]], start: float) -> None:
    """The series of a panel, with a legend if there are several."""
    title, _, names, unit = panel
    shown_unit = UNITS.get(unit, unit)
    axis.set_title(f"{title} ({shown_unit})" if shown_unit else title, fontsize=10, loc="left")
    held = [0.0]
    for series in several:
        times, values = zip(*((float(t) - start, float(v)) for t, v in series["values"]), strict=True)
        axis.plot([t / 60 for t in times], values, label=legend(names, series["metric"]) or None, linewidth=1.3)
        held += values
    axis.set_ylim(1.05 * min(held), 1.05 * max(held) or 1.0)
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
    if len(several) > 1:
        axis.legend(fontsize=7, framealpha=0.8, ncols=2 if len(several) > 4 else 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("out", type=Path, help="folder to write the pictures to")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes to draw")
    parser.add_argument(
        "--end", type=float, default=time.time(), help="Unix time at which the drawn period ends; now by default"
    )
    parser.add_argument(
        "--window", default="5m", help="window of the rates; a short run needs a shorter one than the boards use"
    )
    given = parser.parse_args()
    start = given.end - 60 * given.minutes
    for name in ("FLEET", "TRAINING"):
        draw(given.url.rstrip("/"), BOARDS[name], given.out / f"{name.lower()}.png", start, given.end, given.window)
