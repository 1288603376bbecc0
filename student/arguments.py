"""Arguments that several of the student's commands share."""

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[dotted.key=value ...]", help="Replace keys of the recipe.")
]
"""Values for keys of the recipe, which win over the file; None without any."""
