"""Renders the report's JSON data as a page: one file, without scripts and without network access."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from yaml import YAMLError

from opd.config.text import write_yaml
from opd.errors import one_line
from opd.files import as_bytes, write_out
from opd.printable import printable
from student.report.page.chart import COLOURS, PALETTE, STYLE, lines, number, stacks
from student.report.page.read import read_run
from student.run.progress import duration
from student.run.reading import group, is_number, is_token

if TYPE_CHECKING:
    from jinja2 import Template

T = TypeVar("T")
LIMIT_BYTES = 2_000_000
_ROWS, _FEWEST = 500, 20
"""Rows of a table at first, and the number below which they are not cut any more to keep the limit."""
_WIDTH, _NAME = 400, 500
"""Characters of the longest text, for each row that a table may have, and of a text within a table."""
_FULL_NATS = 2.0
"""The divergence at which a token has the full colour."""
_NOTABLE = 5
"""Number of tokens of an answer that can be reached by keyboard and are listed in its table."""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page and, next to it, the same as JSON.

    Args:
        run: the run folder.
        out: the page; RUN/report.html when None. The twin has the same name with .json.

    Returns:
        The page.

    Raises:
        RunFolderError: if `run` is not a run folder.
        OSError: if a file cannot be written; an earlier report is then left as it was.
    """
    out = run / "report.html" if out is None else out
    data = read_run(run)
    write_out(out.with_suffix(".json"), json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_out(out, render(data))
    return out


def render(data: Mapping[str, Any]) -> str:
    """The page, below 2 MB: if the answers take too much, later ones are left out, and then rows of tables.

    The page says so. The texts of others are isolated (`<bdi>`), controls in them are visible escapes, and what cannot
    be drawn becomes a line of "problems".
    """
    samples, most = list(data["samples"]), _ROWS
    while True:
        text = _page(data, samples, most)
        if len(as_bytes(text)) < LIMIT_BYTES or (not samples and most < _FEWEST):
            return text
        if samples:
            samples = samples[: len(samples) * 3 // 4]
        else:
            most //= 4


def _page(data: Mapping[str, Any], samples: Sequence[Any], most: int) -> str:
    """The page with these answers and at most `most` rows of each table."""
    problems = list(data["problems"])
    curves = [{**chart, "series": _first(chart["series"], most // 20, problems, "curves")} for chart in data["curves"]]
    charts = [(chart, made(partial(lines, chart), chart["title"], problems)) for chart in curves]
    stages = dict(
        zip(data["stages"]["total"], _first(data["stages"]["total"], most // 20, problems, "stages"), strict=False)
    )
    totals = {name: data["stages"]["total"][full] for full, name in stages.items()}
    bars = [
        {**bar, "seconds": {name: bar["seconds"][full] for full, name in stages.items()}}
        for bar in data["stages"]["bars"]
    ]
    shown = {
        **data,
        "stages": {"total": totals, "bars": bars},
        "figures": _first(data["figures"], most, problems, "metrics"),
        "costs": _first(data["costs"], most, problems, "costs"),
        "idle": _first(data["idle"], most, problems, "mechanisms that never acted"),
    }
    if data["fleet"] is not None:
        shown["fleet"] = {
            **data["fleet"],
            "replicas": _first(data["fleet"]["replicas"], most, problems, "replicas"),
            "counters": dict(_first(list(data["fleet"]["counters"].items()), most, problems, "counters")),
        }
    width = most * _WIDTH  # characters of the longest text
    return template("page").render(
        data=shown,
        problems=problems,
        name=Path(data["run"]).name or data["run"],
        exchanges=exchanges(samples),
        left_out=len(data["samples"]) - len(samples),
        charts=charts,
        stage_chart=made(partial(stacks, bars, list(totals)), "the chart of times", problems) if totals else "",
        recipe=cut(made(partial(write_yaml, data["recipe"], allow_unicode=True), "the recipe", problems), width),
        facts=[(name, cut(value, width)) for name, value in _facts(data)],
        error=cut(str(data["status"]["error"]), width),
        where=cut(_where(data), width),
    )


def _first(held: Collection[T], most: int, problems: list[str], what: str) -> list[T]:
    """The first rows of a table, with short texts."""
    if len(held) > most:
        problems.append(f"{most} of {len(held):,} {what} are shown; report.json has all.")
    return [_short(one) for one in islice(held, most)]


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return cut(value, _NAME)
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    return type(value)(map(_short, value)) if isinstance(value, list | tuple) else value


def cut(text: str, width: int) -> str:
    """The text, or its first `width` characters and how many more there are."""
    return text if len(text) <= width else f"{text[:width]} ... ({len(text) - width:,} more characters)"


def made(make: Callable[[], str], what: str, problems: list[str]) -> str:
    """A part of the page; "" if it cannot be made of what a stranger wrote, such as numbers too far apart to draw."""
    try:
        return make()
    except (ArithmeticError, ValueError, StopIteration, YAMLError) as error:
        problems.append(f"{what} cannot be shown: {one_line(error, 160)}.")
        return ""


@cache
def template(name: str) -> "Template":
    """One of the page templates beside this file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_printable,
    )
    environment.globals.update(
        colours=COLOURS, palette=PALETTE, chart_style=STYLE, number=number, duration=duration, in_bytes=in_bytes
    )
    return environment.get_template(f"{name}.html.jinja")


def _printable(value: Any) -> Any:
    return printable(value) if type(value) is str else value  # markup of our own stays


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was run, in a few lines, as far as the run folder says it."""
    recipe, provenance = data["recipe"], data["provenance"]
    teachers, train, rollout, prompts = (group(recipe, name) for name in ("teachers", "train", "rollout", "prompts"))
    packages, served = group(provenance, "packages"), ", ".join(group(provenance, "fleet"))
    command = provenance.get("command")
    facts = [
        ("folder", data["run"]),
        ("student", group(recipe, "model").get("path")),
        ("teachers", served or teachers.get("default")),
        ("endpoints", plain(teachers.get("endpoints"))),
        ("objective", plain(recipe.get("objective"))),
        ("methods", plain(recipe.get("methods"))),
        ("rewards", plain(recipe.get("rewards"))),
        ("prompts", plain(prompts)),
        ("rows per step", _product(rollout.get("prompts_per_step"), rollout.get("samples_per_prompt"))),
        ("longest response", rollout.get("max_new_tokens")),
        ("learning rate", train.get("learning_rate")),
        ("seed", recipe.get("seed")),
        ("command", " ".join(map(str, command)) if isinstance(command, list) else command),
        ("versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("code", provenance.get("git_revision")),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "", [], {})]


def _where(data: Mapping[str, Any]) -> str:
    """When the run went, where and for how long, and of when the page is."""
    held = data["provenance"]
    dates = " to ".join(str(date) for date in (held.get("started"), data["ended"]) if date)
    took = duration(data["seconds"]) if data["seconds"] else ""
    said = [str(part) for part in (dates, took, held.get("host"), held.get("device")) if part]
    return " · ".join([*said, f"page written {data['written']}"])


def plain(value: Any) -> str:
    """Settings as one line, without those that say nothing."""
    if isinstance(value, dict):
        held = {key: plain(one) for key, one in value.items() if one not in (None, {}, [], "")}
        return ", ".join(one if key in ("name", "") else f"{key}: {one}" for key, one in held.items())
    return "; ".join(map(plain, value)) if isinstance(value, list) else "" if value is None else str(value)


def _product(one: Any, other: Any) -> Any:
    return one * other if isinstance(one, int) and isinstance(other, int) and is_number(one * other) else None


def in_bytes(value: float) -> str:
    """A number of bytes for people."""
    return f"{number(value / 1e6)} MB" if value >= 1e6 else f"{number(value)} bytes"


def exchanges(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each prompt with its answers beside each other, as the templates show them, those of evaluations first."""
    found: dict[Any, dict[str, Any]] = {}
    for index, sample in enumerate(map(_sample, samples)):
        trained = sample["label"] == "train"
        same = index if sample["uid"] is None else (trained, str(sample["uid"]), sample["prompt"])
        found.setdefault(same, {"prompt": sample["prompt"], "reference": sample["reference"], "answers": []})
        found[same]["answers"].append(sample)
    return list(found.values())


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """An answer in the form that the template shows: tokens with colours and descriptions."""
    held = sample.get("pieces")
    pieces = [piece for piece in held if is_token(piece)] if isinstance(held, list) else []
    strongest = sorted((p for p in pieces if p[1] is not None), key=lambda p: -abs(p[1]))[:_NOTABLE]
    notable = [piece for piece in pieces if any(piece is one for one in strongest)]
    prompt = sample.get("prompt")
    if isinstance(prompt, list):
        messages = [message for message in prompt if isinstance(message, dict)]
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    return {
        **{
            key: sample.get(key)
            for key in ("uid", "label", "step", "answer", "reference", "verdict", "reason", "reward")
        },
        **{key: sample.get(key) for key in ("kl", "tokens", "domain", "teacher", "measure", "truncated")},
        "prompt": prompt,
        "pieces": [{**_token(piece), "notable": any(piece is one for one in notable)} for piece in pieces],
        "notable": [_token(piece) for piece in notable],
    }


def _token(piece: list[Any]) -> dict[str, Any]:
    text, value, likely = piece
    says = ", ".join(f"{other!r} {probability:.0%}" for other, probability in likely)
    nats = "not trained" if value is None else f"{value:.2f} nats"
    return {
        "text": text,
        "value": value,
        "nats": nats,
        "likely": says,
        "said": f"{nats}; teacher: {says}" if says else nats,
        "depth": 0.0 if value is None else round(min(1.0, abs(value) / _FULL_NATS), 2),
        "side": "likes" if value is not None and value < 0 else "",
    }
