"""Command-line arguments that several of the student's commands share."""

from pathlib import Path
from typing import Annotated

import typer

from opd.errors import ConfigError

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[dotted.key=value ...]", help="Replace keys of the recipe.")
]
"""Settings that take precedence over the recipe's file, each "dotted.key=value"; None if there are none."""


def check_out(out: Path) -> None:
    """Check before the work begins that the file `--out` can be created after it.

    Raises:
        ConfigError: if `out` is a folder, or its parent folder does not exist.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {out} does not exist; create {out.parent} first.")
