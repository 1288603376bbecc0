"""`opd merge OUT MODEL[=WEIGHT] ...`: merges several checkpoints into one."""

from pathlib import Path
from typing import Annotated

import typer

from opd.printable import echo


def merge(
    out: Annotated[Path, typer.Argument(help="Folder for the merged model; must not exist yet.")],
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL[=WEIGHT]...",
            help="Model folders to merge, or BASE+ADAPTER. WEIGHT defaults to 1; several, such as 0.2,0.5,0.8, are "
            "interpolated along the layers.",
        ),
    ],
    method: Annotated[
        str, typer.Option(help="Rule of the merge: linear, task_arithmetic, ties, dare_linear, dare_ties or slerp.")
    ] = "linear",
    base: Annotated[
        str | None,
        typer.Option(help="Base model from which differences are taken; all rules except linear and slerp need it."),
    ] = None,
    density: Annotated[float, typer.Option(help="Share of each difference that ties and dare keep.")] = 0.5,
    scale: Annotated[float, typer.Option(help="Factor on the summed differences from the base.")] = 1.0,
    t: Annotated[float, typer.Option(help="Position on the slerp arc; 0 is the first model.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the random choice that dare makes.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of the result: float32, bfloat16 or float16; by default that of the base or first model."
        ),
    ] = None,
) -> None:
    """Merge checkpoints of one architecture. merge.json in OUT records the inputs.

    To merge a PEFT adapter into its base: opd merge OUT BASE+ADAPTER
    """
    from opd.config import parse_settings
    from student.orbit.merge import MergeSettings
    from student.orbit.merge import merge as run

    raw = {
        "method": method,
        "models": [_model(text) for text in models],
        "base": base,
        "density": density,
        "scale": scale,
        "t": t,
        "seed": seed,
        "dtype": dtype,
    }
    settings = parse_settings(MergeSettings, raw, source="merge")
    count = len(settings.models)
    echo(f"merged {count} model{'s' if count > 1 else ''} by {settings.method} into {run(settings, out)}")


def _model(text: str) -> dict[str, object]:
    from math import isfinite

    from opd.errors import ConfigError

    path, _, weight = text.partition("=")
    try:
        values = [float(part) for part in weight.split(",")] if weight else [1.0]
        if not all(map(isfinite, values)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"weight {weight!r} of model {path!r} must be a number, or several separated by commas."
        ) from None
    return {"path": path, "weight": values[0] if len(values) == 1 else values}
