"""The option --keys of `opd train` and `opd serve`, which prints all settings of the command."""

from typing import Any

import typer

from opd.printable import echo
from opd.registry import imported


def keys_option(settings: str, text: str) -> Any:
    """The option: prints every key of the settings with its default, then ends the command.

    Args:
        settings: path "package.module:Class" of the settings, imported only where the option is given.
        text: help of the option.
    """

    def show(wanted: bool) -> None:
        if wanted:
            from opd.config.reference import describe_keys

            for key, default, meaning in describe_keys(imported(settings)):
                echo(f"{key}: {default}. {meaning}")
            raise typer.Exit

    return typer.Option("--keys", is_eager=True, callback=show, help=text)
