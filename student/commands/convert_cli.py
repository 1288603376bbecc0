"""`opd convert FILE.gguf OUT`: makes the folder of a model from a GGUF file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from opd.printable import echo_line

if TYPE_CHECKING:
    from student.commands.convert import Dtype


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="GGUF file of a causal language model.")],
    out: Annotated[Path, typer.Argument(help="Folder for the model; must not exist yet.")],
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights: float32, which keeps every bit of them, bfloat16 or float16.")
    ] = "float32",
) -> None:
    """Convert a GGUF file into the folder that `opd serve --model` and `model.path` take.

    Weights are multiplied out, so the folder is several times as large as the file. Ends with a greedy answer of the
    converted model: if that makes no sense, the model was not read rightly.
    """
    from opd.errors import ConfigError

    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"--dtype is {dtype!r}; use float32, bfloat16 or float16.")
    # Imported after all checks, because importing torch takes seconds.
    from student.commands.convert import convert as run

    found = run(file, out, cast("Dtype", dtype))
    licence = f", licence {found.license}" if found.license else ""
    echo_line(f"{out}: {found.architecture}, {found.parameters / 1e6:,.1f} M parameters, {dtype}{licence}")
    echo_line(f"greedy answer: {found.prompt} -> {found.answer}")
