"""`opd fleet status`, `verify` and `update-weights`. Whatever is slow to import is imported inside the commands."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.errors import ConfigError, IncompatibleTeacherError, UnavailableError
from opd.printable import echo, echo_line

if TYPE_CHECKING:
    from opd.fleet.settings import FleetSettings
    from opd.fleet.status.records import FleetStatus

app = typer.Typer(no_args_is_help=True, help="Inspect and update a fleet of teacher servers.")

_ENDPOINTS = "Teacher servers: host:port, several separated by commas, file:PATH, dns:NAME:PORT or store:FOLDER."
_LOOK_SECONDS = 3
Endpoints = Annotated[str, typer.Argument(help=_ENDPOINTS)]
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
    endpoints: Annotated[str | None, typer.Argument(help=f"{_ENDPOINTS} Not with --run.")] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="Folder of a run: what the run itself sees of its teachers, through its metrics_port, or saw when it "
            "ended.",
        ),
    ] = None,
    watch: Annotated[float, typer.Option(help="Seconds between refreshes, until Ctrl-C; 0 prints once.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Show teachers and replicas: state, queue, speed, versions, agreement. Exits with 1 unless all are usable.

    ENDPOINTS are looked at by a client of this command, which checks them anew and waits three seconds for those that
    are silent; --run shows the view of a run, which also knows which replicas it has rejected.
    """
    if (endpoints is None) == (run is None):
        raise ConfigError("opd fleet status needs ENDPOINTS or --run RUN; give one of them.")
    if run is not None:
        from opd.fleet.status.of_run import status_of_run

        _show(lambda: status_of_run(run), watch, as_json)
        return
    from opd.fleet.client import TeacherFleet

    chosen = fleet_settings(settings, [f"connect_seconds={_LOOK_SECONDS}", *override])
    with TeacherFleet.connect(endpoints or "", settings=chosen, client="status", look=True) as fleet:
        fleet.settle()  # connect does not wait for replicas to be checked
        _show(fleet.status, watch, as_json)


def _show(look: Callable[[], "FleetStatus"], watch: float, as_json: bool) -> None:
    """Print what `look` sees, again every `watch` seconds if that is above 0.

    Raises:
        typer.Exit: with 1 unless all of it is usable.
    """
    from dataclasses import asdict

    from rich.live import Live

    from opd.console import Console
    from opd.fleet.status.table import status_view

    found = look()
    if as_json:
        echo(json.dumps(asdict(found)))
    elif not 0 < watch < float("inf"):
        Console().print(status_view(found))
    else:
        with Live(status_view(found), auto_refresh=False) as live:
            while True:
                time.sleep(watch)
                live.update(status_view(look()), refresh=True)
    if not found.usable:
        raise typer.Exit(1)


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
