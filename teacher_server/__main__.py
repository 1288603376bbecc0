"""`python -m teacher_server`: the same as `opd serve`."""

import sys

import typer

from opd.errors import OpdError
from teacher_server.cli import serve


def main() -> None:
    """Run the command; an `OpdError` becomes one sentence and its exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    try:
        app()
    except OpdError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
