"""`opd prune MODEL OUT`: a smaller student, by leaving out layers."""

from pathlib import Path
from typing import Annotated

import typer

from opd.printable import echo


def prune(
    model: Annotated[str, typer.Argument(help="Folder or hub id of the model.")],
    out: Annotated[Path, typer.Argument(help="Folder for the smaller model; must not exist yet.")],
    layers: Annotated[
        int, typer.Option(min=0, help="Number of layers to keep. Those that go are the ones that are missed least.")
    ] = 0,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines or parquet with prompts as in recipes, on which that is measured; the first 32."),
    ] = None,
    drop: Annotated[
        str | None, typer.Option(help="Layers to leave out, from 0 on, such as 16,17,18; instead of --layers.")
    ] = None,
) -> None:
    """Leave out layers of a model, so that distilling the whole model into it wins back what it lost.

    Layers are chosen one after another: each time the one without which the reverse KL to the whole model, on its own
    greedy answers, rises least. Prints that curve.
    """
    from opd.errors import ConfigError

    if (drop is None) == (layers == 0):
        raise ConfigError("give either --layers, with --prompts, or --drop.")
    try:
        chosen = [int(layer) for layer in drop.split(",")] if drop is not None else []
    except ValueError:
        raise ConfigError(f"--drop is {drop!r}; give numbers of layers, such as 16,17,18.") from None
    # Imported after all checks, because importing torch takes seconds.
    from student.commands.prune import prune as run

    def told(layer: int, kl: float) -> None:
        echo(f"without layer {layer}: reverse KL {kl:.4f} nats per token")

    gone = run(model, out, layers=layers, prompts=prompts, drop=chosen, told=told)
    echo(f"{out}: without layers {', '.join(str(layer) for layer, _ in sorted(gone))}")
