"""Arguments that several of the student's commands share."""

from pathlib import Path
from typing import Annotated

import typer

from opd.errors import ConfigError

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[dotted.key=value ...]", help="Replace keys of the recipe.")
]
"""Values for keys of the recipe, which win over the file; None without any."""


def check_out(out: Path) -> None:
    """Refuse a file of `--out` that could not be written once the work is done.

    Raises:
        ConfigError: for a folder, or a file in a folder that does not exist.
    """
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"the folder of --out {out} does not exist; make {out.parent} first.")
