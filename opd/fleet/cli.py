"""`opd fleet status`, `opd fleet verify` and `opd score`; everything heavy is imported inside the commands."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.errors import DataError, IncompatibleTeacherError

if TYPE_CHECKING:
    from opd.fleet.settings import FleetSettings
    from opd.wire.types import PayloadSpec, ScoreItem

app = typer.Typer(no_args_is_help=True, help="Look at a fleet of teacher servers.")

Endpoints = Annotated[
    str, typer.Argument(help="host:port, several with commas, file:PATH, dns:NAME:PORT or store:FOLDER.")
]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="YAML file with the fleet's settings.")]
Override = Annotated[list[str], typer.Option("--set", help="dotted.key=value of the fleet's settings; repeatable.")]


def _settings(path: Path | None, overrides: list[str]) -> "FleetSettings":
    from opd.config import load_settings
    from opd.fleet.settings import FleetSettings

    # No file is an empty one, so that overrides are read in one place.
    return load_settings(FleetSettings, path or os.devnull, overrides)


@app.command()
def status(
    endpoints: Endpoints,
    watch: Annotated[float, typer.Option(help="Refresh every so many seconds until Ctrl-C; 0 prints once.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Show teachers and replicas: state, queue, speed, versions, agreement."""
    from dataclasses import asdict

    from rich.console import Console
    from rich.live import Live

    from opd.fleet.client import TeacherFleet
    from opd.fleet.view import status_view

    with TeacherFleet.connect(endpoints, settings=_settings(settings, override), client="status") as fleet:
        if as_json:
            typer.echo(json.dumps(asdict(fleet.status())))
        elif watch <= 0:
            Console().print(status_view(fleet.status()))
        else:
            with Live(status_view(fleet.status()), auto_refresh=False) as live:
                while True:
                    time.sleep(watch)
                    live.update(status_view(fleet.status()), refresh=True)


@app.command()
def verify(
    endpoints: Endpoints,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Score one probe on every replica of every teacher and report the largest differences in nats."""
    from opd.fleet.client import TeacherFleet

    with TeacherFleet.connect(endpoints, settings=_settings(settings, override), client="verify") as fleet:
        reports = [fleet.verify(name) for name in fleet.teachers()]
    for report in reports:
        typer.echo(report.sentence())
        for address, sentence in report.errors.items():
            typer.echo(f"  {address}: {sentence}")
    bad = [report for report in reports if not report.agrees]
    if bad:
        raise IncompatibleTeacherError(f"replicas disagree or do not answer: {bad[0].sentence()}")


def score(
    endpoints: Endpoints,
    rows: Annotated[Path, typer.Option(help="JSON lines with prompt_ids and response_ids, and gather_ids for gather.")],
    out: Annotated[Path, typer.Option(help="Folder of the store; rows that are there already are not scored again.")],
    teacher: Annotated[str, typer.Option(help="Teacher; may be left out when only one is served.")] = "",
    payload: Annotated[str, typer.Option(help="sampled, topk, gather or hidden.")] = "topk",
    k: Annotated[int, typer.Option(help="Ids per position, for topk and gather.")] = 64,
    value_dtype: Annotated[str, typer.Option(help="f16, f32 or u16; bf16 or f32 for hidden.")] = "",
    temperature: Annotated[float, typer.Option(help="Divides the logits before normalisation.")] = 1.0,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Score rows once and keep the scores, to train from without any teacher (endpoint store:FOLDER)."""
    from opd.fleet.client import TeacherFleet

    spec = _spec(payload, k, value_dtype)
    chosen = _settings(settings, [*override, f"cache.folder={json.dumps(str(out))}"])
    items = list(_read_rows(rows, spec))
    if not items:
        raise DataError(f"{rows} holds no rows; give one JSON object per line.")
    with TeacherFleet.connect(endpoints, settings=chosen, client="score") as fleet:
        served = sorted(fleet.teachers())
        if not teacher and len(served) > 1:
            raise DataError(f"the fleet serves {', '.join(served)}; name one with --teacher.")
        name = teacher or served[0]
        scores = fleet.score(name, items, spec, temperature=temperature)
        if payload == "hidden":
            fleet.head(name)
    tokens = sum(item.response_length for item in items)
    size = sum(found.wire_bytes for found in scores)
    typer.echo(f"{len(scores)} rows, {tokens} response tokens, {size} bytes of scores by {name!r} in {out}")


def _spec(payload: str, k: int, value_dtype: str) -> "PayloadSpec":
    from opd.wire.types import PayloadKind, PayloadSpec

    if payload not in list(PayloadKind):
        raise DataError(f"payload {payload!r} is none of {', '.join(PayloadKind)}.")
    kind = PayloadKind(payload)
    default = "bf16" if kind is PayloadKind.HIDDEN else "f16"
    return PayloadSpec(kind, k if kind in (PayloadKind.TOPK, PayloadKind.GATHER) else 0, value_dtype or default)


def _read_rows(path: Path, spec: "PayloadSpec") -> Iterator["ScoreItem"]:
    import numpy as np

    from opd.wire.types import PayloadKind, ScoreItem

    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"rows {path} cannot be read: {error.strerror}; check the path.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, response = row["prompt_ids"], row["response_ids"]
            ids = np.array([*prompt, *response], dtype=np.uint32)
            gather = np.array(row["gather_ids"], dtype=np.uint32) if spec.kind is PayloadKind.GATHER else None
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(
                f"line {number} of {path} is not a row with prompt_ids and response_ids"
                f"{' and gather_ids' if spec.kind is PayloadKind.GATHER else ''}: {error}."
            ) from error
        yield ScoreItem(ids, len(prompt), gather)
