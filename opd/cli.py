"""The command line: `opd --help`. Verbs of the upper floors are found by entry point, so this floor imports none.

Every error a user can meet is one sentence on stderr and an exit code of its own (see opd/errors.py).
"""

import logging
import os
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from opd import __version__
from opd.errors import OpdError

app = typer.Typer(
    name="opd",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="On-policy distillation as a service: teachers served over gRPC, students that learn from them.",
    epilog="Start with `opd tiny build world`, then `opd serve`, then `opd train`. Docs: README.md.",
)


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log at level DEBUG.")] = False,
) -> None:
    if version:
        typer.echo(f"opd {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.DEBUG if verbose else os.environ.get("OPD_LOG_LEVEL", "WARNING").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _add_verbs() -> None:
    for point in sorted(entry_points(group="opd.commands"), key=lambda p: p.name):
        try:
            verb = point.load()
        except ImportError as error:
            logging.getLogger(__name__).warning("verb %r cannot be loaded: %s", point.name, error)
            continue
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=point.name)
        else:
            app.command(name=point.name)(verb)


def main() -> None:
    """Entry point of the `opd` command."""
    _add_verbs()
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except OpdError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        # Errors of the command line itself carry their own usage message.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
