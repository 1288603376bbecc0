"""`opd tiny build DIR | FILE` trains a world of small models from scratch on this CPU.

`opd tiny random DIR` writes untrained models of a real shape, with which to measure speed.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.errors import ConfigError
from opd.printable import echo

if TYPE_CHECKING:
    from opd_lab.tiny.summary import WorldSummary

app = typer.Typer(
    no_args_is_help=True, help="Build tiny models from scratch on a CPU, to try, test and study distillation."
)


class Preset(StrEnum):
    """The worlds that can be built."""

    DEMO = "demo"
    LAB = "lab"
    TEST = "test"


@app.callback()
def tiny() -> None:
    """Build tiny models from scratch on a CPU, to try, test and study distillation."""


@app.command()
def build(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE",
            help="Folder for the world of a preset, created if missing. Or a .yaml file that describes your own "
            "world, which is built next to it in a folder of the same name (docs/tiny.md has an example).",
        ),
    ],
    preset: Annotated[
        Preset,
        typer.Option(
            help="demo: a student and a much better teacher on two-digit sums, in a minute or two. "
            "lab: a base model, domain teachers and a larger teacher on several tasks, in many minutes. "
            "test: hardly trained models, in seconds."
        ),
    ] = Preset.DEMO,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of weights and problems; the same seed gives the same world.")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the world that a .yaml file describes.")] = None,
) -> None:
    """Build a world: small Qwen3-architecture models with a tokenizer, trained on procedural tasks.

    The output has one folder per model, which plain transformers can load, and world.json with the tasks and the
    measured accuracies. An existing world is left as it is, and an interrupted build continues.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from opd.console import Console
    from opd_lab.tiny.build import build_world
    from opd_lab.tiny.files import is_world_file

    mine = is_world_file(place)
    if out is not None and not mine:
        raise ConfigError(
            f"--out can only be used with a world file, but {place} is the folder of a preset; leave it out."
        )
    folder = out or (place.with_suffix("") if mine else place)
    console = Console()
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(model: str, done: int, total: int) -> None:
            if model not in tasks:
                tasks[model] = bars.add_task(model, total=total)
            bars.update(tasks[model], completed=done)

        world = build_world(folder, place if mine else preset.value, seed=seed, progress=advance)
    console.print(_table(world))
    if world.cached:
        console.print(f"{world.folder} has been built already; there is nothing to do.", markup=False)


@app.command("random")
def random_models(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to create, with student, teacher and prompts.jsonl.")
    ],
    student: Annotated[
        str, typer.Option(help="Shape of the student: qwen2.5-0.5b, qwen2.5-1.5b, qwen3-1.7b or qwen3-8b.")
    ] = "qwen2.5-0.5b",
    teacher: Annotated[
        str, typer.Option(help="Shape of the teacher; the same choices as for --student.")
    ] = "qwen2.5-1.5b",
    scale: Annotated[
        float, typer.Option(help="Fraction of width, layers and heads to keep, for small machines.")
    ] = 1.0,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Rows of the embedding, that is, ids of the vocabulary. Default: as many as the shapes have."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the stored weights: bfloat16, float16 or float32.")] = "bfloat16",
    prompts: Annotated[int, typer.Option(min=2, help="Number of prompts to write.")] = 4096,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens per prompt.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and prompts.")] = 0,
) -> None:
    """Write a student and a teacher of real shapes with random weights, and prompts of random words.

    Use it to measure throughput, memory and traffic without access to a model hub: the models know nothing, and their
    answers run to the limit of new tokens. Needs memory for the larger model in its dtype: 16 GB for qwen3-8b.
    """
    from opd_lab.tiny.random_models import make_random_models, random_shape

    shapes = [random_shape(name).scaled(scale, vocabulary) for name in (student, teacher)]
    sizes = make_random_models(folder, *shapes, seed=seed, dtype=dtype, prompts=prompts, prompt_tokens=prompt_tokens)
    for name, size in sizes.items():
        echo(f"{folder / name}: {size:,} parameters")
    echo(f"{folder / 'prompts.jsonl'}: {prompts} prompts of {prompt_tokens} tokens")


def _table(world: "WorldSummary") -> object:
    """A table of the models with their sizes and accuracies."""
    from opd.console import Table

    table = Table(title=f"world {world.preset!r}, seed {world.seed}: accuracy on held-out prompts, greedy / sampled")
    for heading in ("model", "parameters", *world.tasks):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name, model in world.models.items():
        cells = (f"{model.greedy[task]:.3f} / {model.sampled[task]:.3f}" for task in world.tasks)
        table.add_row(name, f"{model.parameters:,}", *cells)
    return table
