"""make demo: a student distils from a teacher over gRPC, end to end, on a CPU, from nothing.

    python examples/demo.py [--run runs/demo] [--seed 0]

Builds the tiny world (two Qwen3-architecture models trained on the spot), starts a teacher server in a process of its
own, trains the student by on-policy distillation against it, evaluates, and ends with a table and RUN/summary.json.
Running it again keeps the world and repeats the rest.
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from opd.config import load_settings
from opd.errors import OpdError
from opd_lab.tiny.build import build_world
from opd_lab.tiny.summary import WorldSummary
from student.commands.evaluate_model import evaluate_model
from student.job.session import train
from student.report.answers import compared
from student.run.local_server import served
from student.settings.recipe import Recipe

RECIPE = Path(__file__).parent / "recipes" / "demo.yaml"


def build(folder: Path, seed: int, console: Console) -> WorldSummary:
    """Build the world, with a bar per model."""
    columns = (TextColumn("{task.description:>20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(model: str, done: int, total: int) -> None:
            if model not in tasks:
                tasks[model] = bars.add_task(f"making the {model}", total=total)
            bars.update(tasks[model], completed=done)

        return build_world(folder, "demo", seed=seed, progress=advance)


def table(summary: dict[str, Any]) -> Table:
    """The result as a table."""
    out = Table(title="on-policy distillation over gRPC, held-out prompts")
    out.add_column("")
    for name in ("accuracy", "reverse KL (nats/token)", "tokens", "seconds"):
        out.add_column(name, justify="right")
    rows = (
        ("student before", summary["student_before"], summary["reverse_kl_before"], None),
        ("student after", summary["student_after"], summary["reverse_kl_after"], summary["train_tokens"]),
        ("teacher", summary["teacher"], 0.0, None),
    )
    for name, report, divergence, tokens in rows:
        seconds = f"{summary['train_seconds']:.0f}" if tokens else ""
        out.add_row(name, f"{report['accuracy']:.3f}", f"{divergence:.4f}", f"{tokens:,}" if tokens else "", seconds)
    return out


def demo(
    run: Annotated[Path, typer.Option(help="Folder of the demo.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Decides world, prompts and rollouts.")] = 0,
) -> None:
    """Run the demo."""
    console = Console()
    begin = time.monotonic()
    run.mkdir(parents=True, exist_ok=True)
    world = build(run / f"world-{seed}", seed, console)
    shutil.rmtree(run / "student", ignore_errors=True)
    student, teacher_model = str(world.models["student"].path), str(world.models["teacher"].path)
    with served({"teacher": teacher_model}, run) as address:
        overrides = [
            f"run={run / 'student'}",
            f"seed={seed}",
            f"model.path={student}",
            f"teachers.endpoints=[{address}]",
        ]
        recipe = load_settings(Recipe, RECIPE, overrides)
        started = time.monotonic()
        result = train(recipe)
        train_seconds = time.monotonic() - started
        quiet = load_settings(Recipe, RECIPE, [*overrides, "eval.reverse_kl=false"])
        teacher = evaluate_model(quiet, teacher_model)
    summary = {
        "student_before": result["before"],
        "student_after": result["after"],
        "teacher": teacher,
        "reverse_kl_before": result["before"]["reverse_kl"],
        "reverse_kl_after": result["after"]["reverse_kl"],
        "train_tokens": result["response_tokens"],
        "train_seconds": train_seconds,
        "seconds": time.monotonic() - begin,
        "checkpoint": result["checkpoint"],
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(table(summary))
    console.print(compared(run / "student"))
    console.print(f"checkpoint: {result['checkpoint']}\nrun folder: {run}  ({summary['seconds']:.0f} seconds in all)")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        typer.run(demo)
    except OpdError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
