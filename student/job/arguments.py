"""Command-line arguments that several of the student's commands share."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[dotted.key=value ...]", help="Replace keys of the recipe.")
]
"""Settings that take precedence over the recipe's file, each "dotted.key=value"; None if there are none."""
