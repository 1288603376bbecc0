"""`opd fleet status`, `verify` and `update-weights`. Whatever is slow to import is imported inside the commands."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.errors import IncompatibleTeacherError, UnavailableError
from opd.printable import echo, echo_line

if TYPE_CHECKING:
    from opd.fleet.settings import FleetSettings

app = typer.Typer(no_args_is_help=True, help="Inspect and update a fleet of teacher servers.")

Endpoints = Annotated[
    str,
    typer.Argument(
        help="Teacher servers: host:port, several separated by commas, file:PATH, dns:NAME:PORT or store:FOLDER."
    ),
]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="YAML file with settings of the fleet client.")]
Override = Annotated[
    list[str], typer.Option("--set", help="Setting of the fleet client as dotted.key=value; repeatable.")
]


def fleet_settings(path: Path | None, overrides: list[str]) -> "FleetSettings":
    """The settings in `path`, or the defaults, with dotted overrides."""
    from opd.config import load_settings
    from opd.fleet.settings import FleetSettings

    return load_settings(FleetSettings, path, overrides)


@app.command()
def status(
    endpoints: Endpoints,
    watch: Annotated[float, typer.Option(help="Seconds between refreshes, until Ctrl-C; 0 prints once.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Show teachers and replicas: state, queue, speed, versions, agreement."""
    from dataclasses import asdict

    from rich.live import Live

    from opd.console import Console
    from opd.fleet.client import TeacherFleet
    from opd.fleet.status.table import status_view

    chosen = fleet_settings(settings, override)
    with TeacherFleet.connect(endpoints, settings=chosen, client="status", look=True) as fleet:
        fleet.settle()  # connect does not wait for replicas to be checked
        if as_json:
            echo(json.dumps(asdict(fleet.status())))
        elif not 0 < watch < float("inf"):
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
    """Score one random row on every replica of every teacher and report the largest differences in nats.

    Fails if replicas disagree or a listed server does not answer.
    """
    from opd.fleet.client import TeacherFleet

    with TeacherFleet.connect(endpoints, settings=fleet_settings(settings, override), client="verify") as fleet:
        # `connect` returns once some replicas of each teacher are usable; here all that are listed are compared.
        fleet.settle()
        reports = [fleet.verify(name) for name in fleet.teachers()]
        # A server that never answered is in no report, because it is unknown which replicas it should have.
        silent = fleet.status().silent
    # Everything is printed before the verdict, so that one bad replica does not hide the others.
    for server in silent:
        echo_line(f"{server.address} does not answer: {server.error or 'not asked yet'}")
    for report in reports:
        echo_line(report.sentence())
        for address, sentence in report.errors.items():
            echo_line(f"  {address}: {sentence}")
    bad = [report for report in reports if not report.agrees]
    if bad:
        raise IncompatibleTeacherError(
            f"replicas disagree or do not answer; stop or repair those that are named: {bad[0].sentence()}"
        )
    if silent:
        addresses = ", ".join(server.address for server in silent)
        raise UnavailableError(
            f"the replicas that answer agree, but {addresses} did not answer; start those servers, or take them off "
            "the list."
        )


@app.command()
def update_weights(
    endpoints: Endpoints,
    teacher: Annotated[str, typer.Argument(help="Name of the teacher whose weights are replaced.")],
    folder: Annotated[
        str, typer.Argument(help="Folder with the new weights as safetensors, at a path that every server can read.")
    ],
    timeout: Annotated[
        float, typer.Option(help="Seconds within which each replica must have taken the weights.")
    ] = 600.0,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Replace a teacher's weights on every replica while it serves; needs a token with the scope admin."""
    from opd.fleet.client import TeacherFleet

    with TeacherFleet.connect(endpoints, settings=fleet_settings(settings, override), client="update") as fleet:
        update = fleet.update_weights(teacher, folder, timeout=timeout)
    if update.failures:
        raise IncompatibleTeacherError(update.sentence())
    echo_line(update.sentence())
    if update.changed:
        echo(
            "A run that started with other weights waits until the teacher has those again: restore them, or stop the "
            "run and continue it with --resume on these."
        )
