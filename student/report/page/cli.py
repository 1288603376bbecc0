"""`opd report`: the page of a run, whatever state its folder is in."""

from pathlib import Path
from typing import Annotated

import typer

from opd.printable import echo


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished, running or failed run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Page to write. Default: RUN/report.html. The same data is written next to it as JSON."
        ),
    ] = None,
) -> None:
    """Write a run's report: one HTML file with curves, times, fleet, costs and token-by-token answers.

    The page needs no network and no JavaScript. A run also writes it when it ends or fails.
    """
    from opd.errors import OutputError
    from opd.files import check_out
    from student.report.page.page import write_report

    if out is not None:
        check_out(out)
    try:
        page = write_report(run, out)
    except OSError as error:
        raise OutputError(
            f"the report of {run} cannot be written: {error.strerror}: {error.filename}; name another file with --out."
        ) from error
    echo(f"report: {page}")
