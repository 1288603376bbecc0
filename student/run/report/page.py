"""Renders the report's JSON data as a page: one file, without scripts and without network access."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.text import write_yaml
from opd.files import write_whole
from student.run.reading import group, is_number
from student.run.report.chart import COLOURS, lines, number, stacks
from student.run.report.read import read_run

if TYPE_CHECKING:
    from jinja2 import Template

LIMIT_BYTES = 2_000_000
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
    write_whole(out.with_suffix(".json"), json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    write_whole(out, render(data))
    return out


def render(data: Mapping[str, Any]) -> str:
    """The page, below 2 MB: if the answers take too much, later ones are left out, and the page says so."""
    samples = list(data["samples"])
    while True:
        shown = [_sample(sample) for sample in samples]
        text = _template().render(
            data=data,
            name=Path(data["run"]).name or data["run"],
            samples=shown,
            left_out=len(data["samples"]) - len(samples),
            charts=[(chart, lines(chart)) for chart in data["curves"]],
            stage_chart=stacks(data["stages"]["bars"], list(data["stages"]["total"])) if data["stages"]["bars"] else "",
            recipe=write_yaml(data["recipe"], allow_unicode=True),
            facts=_facts(data),
            colours=COLOURS,
            number=number,
        )
        if len(text.encode()) < LIMIT_BYTES or not samples:
            return text
        samples = samples[: len(samples) * 3 // 4]


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html.jinja")


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
        ("endpoints", _plain(teachers.get("endpoints"))),
        ("objective", _plain(recipe.get("objective"))),
        ("methods", _plain(recipe.get("methods"))),
        ("rewards", _plain(recipe.get("rewards"))),
        ("prompts", _plain({key: value for key, value in prompts.items() if value not in (None, {}, [])})),
        ("rows per step", _product(rollout.get("prompts_per_step"), rollout.get("samples_per_prompt"))),
        ("longest response", rollout.get("max_new_tokens")),
        ("learning rate", train.get("learning_rate")),
        ("seed", recipe.get("seed")),
        ("command", " ".join(map(str, command)) if isinstance(command, list) else command),
        ("versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)),
        ("code", provenance.get("git_revision")),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "", [], {})]


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def _product(one: Any, other: Any) -> Any:
    return one * other if isinstance(one, int) and isinstance(other, int) else None


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """An answer in the form that the template shows: tokens with colours and descriptions."""
    held = sample.get("pieces")
    pieces = [piece for piece in held if _is_token(piece)] if isinstance(held, list) else []
    strongest = sorted((p for p in pieces if p[1] is not None), key=lambda p: -abs(p[1]))[:_NOTABLE]
    notable = [piece for piece in pieces if any(piece is one for one in strongest)]
    prompt = sample.get("prompt")
    if isinstance(prompt, list):
        messages = [message for message in prompt if isinstance(message, dict)]
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    return {
        **{key: sample.get(key) for key in ("label", "step", "answer", "reference", "verdict", "reason", "reward")},
        **{key: sample.get(key) for key in ("kl", "tokens", "domain", "teacher", "measure", "truncated")},
        "prompt": prompt,
        "pieces": [{**_token(piece), "notable": any(piece is one for one in notable)} for piece in pieces],
        "notable": [_token(piece) for piece in notable],
    }


def _is_token(piece: Any) -> bool:
    """Whether this is [text, nats or None, [[other text, probability], ...]]."""
    if not isinstance(piece, list) or len(piece) != 3 or not isinstance(piece[2], list):
        return False
    pairs = all(isinstance(pair, list) and len(pair) == 2 and is_number(pair[1]) for pair in piece[2])
    return pairs and (piece[1] is None or is_number(piece[1]))


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
