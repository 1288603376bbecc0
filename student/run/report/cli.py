"""`opd report`: the page of a run, whatever state its folder is in."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of a finished, running or broken run.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; RUN/report.html by default. Its JSON form goes next to it.")
    ] = None,
) -> None:
    """Write a run's report: one HTML file with curves, times, fleet, costs and answers token by token.

    The page needs no network and no JavaScript. A run writes it by itself when it ends or fails.
    """
    from student.run.report.page import write_report

    typer.echo(f"report: {write_report(run, out)}")
