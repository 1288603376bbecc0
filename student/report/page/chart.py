"""Charts as SVG text, drawn without a browser: readable in light and dark, by colour-blind eyes and screen readers."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from opd.printable import printable
from student.run.reading import is_number

WIDTH, HEIGHT = 520, 220
LEFT, RIGHT, TOP, BOTTOM = 68, 28, 12, 40
COLOURS = 8
"""Colours of the page's style, --c0 ...; lines are dashed too, so that not colour alone tells them apart."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_FEW = 16
_SIZES = {"T": 1e12, "G": 1e9, "M": 1e6}
PALETTE = (
    "--c0:#2563c9; --c1:#c2410c; --c2:#15803d; --c3:#9333ea; --c4:#0e7490; --c5:#b91c5c; --c6:#854d0e; --c7:#475569;"
)
"""The colours on a light background."""
STYLE = "svg .g { stroke: var(--line) } svg polyline { fill: none; stroke-width: 2 } svg line { stroke-width: 1.5 }"
_ALONE = f"svg {{ --line:#dfe3e8; {PALETTE} font: 14px system-ui, sans-serif; fill: #5b6470 }} {STYLE}"
_ROW = 18


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that cover low..high."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def number(value: Any) -> str:
    """A figure for people, with four significant digits; what is not a number stays as it is."""
    if not is_number(value):
        return str(value or "unknown")
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.2e}"
    for unit, size in _SIZES.items():
        if abs(value) >= 10 * size:
            return f"{value / size:.4g} {unit}"
    if abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.4g}"


class Frame:
    """Axes that map values to positions in the picture."""

    def __init__(self, x: tuple[float, float], y: Sequence[float]) -> None:
        self.x0, self.x1 = x if x[1] > x[0] else (x[0] - 0.5, x[0] + 0.5)
        self.ticks = list(y)
        self.y0, self.y1 = y[0], y[-1]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The position of a value in the picture."""
        across = (x - self.x0) / (self.x1 - self.x0)
        up = (y - self.y0) / (self.y1 - self.y0)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def grid(self, label: str) -> str:
        """Lines and labels of both axes."""
        parts = []
        for tick in self.ticks:
            _, y = self.at(self.x0, tick)
            parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        for tick in ticks(self.x0, self.x1, 5):
            if self.x0 <= tick <= self.x1:
                x, _ = self.at(tick, self.y0)
                parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{number(tick)}</text>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{_said(label)}</text>')
        return "".join(parts)


def lines(chart: Mapping[str, Any]) -> str:
    """A line chart of `series`, each with x, y and half widths of an interval where they are known."""
    return _svg(chart["title"], *_lines(chart, "step")) if chart["series"] else ""


def picture(chart: Mapping[str, Any], across: str) -> str:
    """A line chart as a file of its own, with its legend below; series with the same `colour` belong together.

    Args:
        chart: as for `lines`, with at least one series.
        across: name of the horizontal axis.
    """
    said, body = _lines(chart, across)
    key = "".join(
        f'<g transform="translate({LEFT} {HEIGHT + _ROW * row})"><line x2="26" y1="-4" y2="-4" {_stroke(one, row)}/>'
        f'<text x="34">{_said(one["name"])}</text></g>'
        for row, one in enumerate(chart["series"], 1)
    )
    drawn = _svg(chart["title"], said, f"<style>{_ALONE}</style>{body}{key}", _ROW * (len(chart["series"]) + 1))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _lines(chart: Mapping[str, Any], across: str) -> tuple[str, str]:
    """What a line chart shows in words, and its elements."""
    series = chart["series"]
    xs = [x for s in series for x in s["x"]]
    lows = [y - (h or 0.0) for s in series for y, h in _points(s)]
    highs = [y + (h or 0.0) for s in series for y, h in _points(s)]
    # Start at 0 if the curve comes near it; otherwise a curve with small changes far from 0 would look flat.
    low = min(0.0, *lows) if min(lows) < 0.5 * max(highs) else min(lows)
    frame = Frame((min(xs), max(xs)), ticks(low, max(highs)))
    body = [frame.grid(across), *(_line(frame, one, index, across) for index, one in enumerate(series))]
    said = "; ".join(f"{s['name']} from {number(s['y'][0])} to {number(s['y'][-1])}" for s in series)
    return said, "".join(body)


def _points(series: Mapping[str, Any]) -> list[tuple[float, float | None]]:
    return list(zip(series["y"], series["half"] or [None] * len(series["y"]), strict=True))


def _stroke(series: Mapping[str, Any], index: int) -> str:
    colour = series.get("colour", index)
    dash = _DASHES[colour % len(_DASHES)] or "none"
    return f'style="stroke:var(--c{colour % COLOURS})" stroke-dasharray="{dash}"'


def _line(frame: Frame, series: Mapping[str, Any], index: int, across: str) -> str:
    places = [frame.at(x, y) for x, y in zip(series["x"], series["y"], strict=True)]
    colour = f"var(--c{series.get('colour', index) % COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" {_stroke(series, index)}/>']
    for (x, y), at, (value, half) in zip(places, series["x"], _points(series), strict=True):
        if half is not None:
            low, high = frame.at(at, value - half)[1], frame.at(at, value + half)[1]
            parts.append(f'<line style="stroke:{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        if len(places) <= _FEW:
            title = f"{series['name']}, {across} {number(at)}: {number(value)}"
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"><title>{_said(title)}</title></circle>'
            )
    return "".join(parts)


def stacks(bars: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Stacked bars: mean seconds of a step by stage, along the run."""
    highest = max(sum(bar["seconds"].values()) for bar in bars) or 1.0
    frame = Frame((bars[0]["from"] - 0.5, bars[-1]["to"] + 0.5), ticks(0.0, highest))
    body = [frame.grid("step")]
    for bar in bars:
        base, title = 0.0, f"steps {bar['from']} to {bar['to']}: "
        title += ", ".join(f"{name} {number(bar['seconds'][name])} s" for name in names)
        body.append(f"<g><title>{_said(title)}</title>")
        for index, name in enumerate(names):
            x0, y1 = frame.at(bar["from"] - 0.5, base + bar["seconds"][name])
            x1, y0 = frame.at(bar["to"] + 0.5, base)
            base += bar["seconds"][name]
            size = f'width="{max(0.5, x1 - x0 - 0.5):.1f}" height="{y0 - y1:.1f}"'
            body.append(f'<rect x="{x0:.1f}" y="{y1:.1f}" {size} style="fill:var(--c{index % COLOURS})"/>')
        body.append("</g>")
    return _svg("Seconds of a step by stage", f"{len(bars)} bars along the run", "".join(body))


def _said(text: str) -> str:
    return escape(printable(text))


def _svg(title: str, description: str, body: str, below: int = 0) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + below}" role="img"><title>{_said(title)}</title>'
        f"<desc>{_said(description)}</desc>{body}</svg>"
    )
