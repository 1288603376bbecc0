"""make real, make real-prompt: a real language model distils on a CPU, end to end, from one file.

    python examples/real.py pruned --gguf FILE [--run runs/real] [--seed 0]       three layers are cut out and recovered
    python examples/real.py french --gguf FILE [--run runs/real-prompt]           a system prompt is distilled away

FILE is SmolLM2-135M-Instruct as scripts/smollm2.sh fetches it. It is converted, served as the teacher and, pruned or
without its prompt, trained. Ends with a table by domain, answers before and after, and RUN/summary.json; exits with 1
if the student gained too little. Running it again keeps the models and repeats the rest.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from real_prompts import write as write_prompts
from rich.table import Table

from opd.config import load_settings
from opd.console import Console
from opd.errors import OpdError, OutputError
from student.commands.convert import convert
from student.commands.evaluate_model import evaluate_model
from student.commands.prune import prune
from student.job.session import train
from student.report.answers import compared
from student.run.local_server import served
from student.settings.recipe import Recipe

RECIPES = Path(__file__).parent / "recipes"
MOST_KL_LEFT, LEAST_GAIN = 0.70, 0.15
"""The gate: share of the reverse KL that may be left, and accuracy that must be gained."""
_DISK_BYTES = 4 * 2**30
"""Two models, a checkpoint with the optimizer's moments, and room to write them."""


@dataclass(frozen=True)
class Job:
    """A recipe, and what its student and teacher are made of.

    Attributes:
        recipe: file of the recipe.
        drop: layers that the student loses; none for a student that is the whole model.
        prompts: number of held-out prompts; 0 for all.
        figure: what the accuracy is called.
    """

    recipe: str
    drop: tuple[int, ...]
    prompts: int
    figure: str


JOBS = {
    "pruned": Job("smollm2-135m-pruned.yaml", (16, 17, 18), 0, "accuracy"),
    "french": Job("smollm2-135m-french.yaml", (), 60, "French answers"),
}


def models(gguf: Path, folder: Path, drop: tuple[int, ...], console: Console) -> tuple[Path, Path]:
    """Folders of the teacher and the student, made on the first run."""
    teacher, student = folder / "teacher", folder / "pruned" if drop else folder / "teacher"
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if not student.exists() and free < _DISK_BYTES:
        raise OutputError(
            f"{folder} has {free / 2**30:.1f} GiB free, but this takes {_DISK_BYTES / 2**30:.0f}; free some."
        )
    if not teacher.exists():
        found = convert(gguf, teacher)
        console.print(f"converted {gguf.name}: {found.parameters / 1e6:.1f} M parameters, licence {found.license}")
        console.print(f"{found.prompt} -> {found.answer}")
    if not student.exists():
        prune(str(teacher), student, drop=drop)
        console.print(f"student: without layers {', '.join(map(str, drop))}")
    return teacher, student


def gate(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, float, bool]:
    """The share of the reverse KL that is left, the accuracy gained, and whether that is enough."""
    left, gained = after["reverse_kl"] / before["reverse_kl"], after["accuracy"] - before["accuracy"]
    return left, gained, left <= MOST_KL_LEFT and gained > LEAST_GAIN


def table(summary: dict[str, Any], figure: str) -> Table:
    """The result as a table, a row for each domain."""
    out = Table(title=f"held-out prompts: {figure}, greedy")
    for name in ("", "before", "after", "teacher", "prompts"):
        out.add_column(name, justify="right" if name else "left")
    before, after, teacher = (summary[name] for name in ("before", "after", "teacher"))
    for domain, (share, count) in before["by_domain"].items():
        rest = (after["by_domain"].get(domain, (float("nan"),))[0], teacher["domains"].get(domain, {}).get("accuracy"))
        out.add_row(domain, f"{share:.2f}", *("" if value is None else f"{value:.2f}" for value in rest), str(count))
    cells = (f"{report['accuracy']:.3f} ± {report['accuracy_half_width']:.3f}" for report in (before, after, teacher))
    out.add_row("all", *cells, str(summary["judged"]))
    divergence = (before["reverse_kl"], after["reverse_kl"], 0.0)
    out.add_row("reverse KL (nats/token)", *(f"{value:.3f}" for value in divergence), str(summary["prompts"]))
    return out


def real(
    name: Annotated[str, typer.Argument(metavar="JOB", help=f"One of {', '.join(JOBS)}.")],
    gguf: Annotated[Path, typer.Option(help="SmolLM2-135M-Instruct as a GGUF file.")],
    run: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/real"),
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of prompts and the rollouts.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train for, if not the recipe's.")] = None,
) -> None:
    """Run one of the jobs."""
    console, begin, job = Console(), time.monotonic(), JOBS[name]
    whole, student = models(gguf, run / "models", job.drop, console)
    file, heldout = write_prompts(run / "prompts")
    shutil.rmtree(run / "student", ignore_errors=True)
    count = job.prompts or len(heldout.read_text().splitlines())
    with served({"teacher": whole}, run, ("--threads", "1", "--device", "cpu")) as address:
        overrides = [
            f"run={run / 'student'}",
            f"seed={seed}",
            f"model.path={student}",
            f"teachers.endpoints=[{address}]",
            f"prompts.file={file}",
            f"prompts.heldout_file={heldout}",
            f"eval.prompts={count}",
            *([f"train.steps={steps}"] if steps else []),
        ]
        recipe = load_settings(Recipe, RECIPES / job.recipe, overrides)
        started = time.monotonic()
        result = train(recipe)
        train_seconds = time.monotonic() - started
        # The teacher reads what it read as a teacher.
        told = recipe.contexts["teacher"].system if recipe.contexts else None
        system = [f"prompts.system={json.dumps(told)}"] if told else []
        quiet = load_settings(Recipe, RECIPES / job.recipe, [*overrides, "eval.reverse_kl=false", *system])
        teacher = evaluate_model(quiet, str(whole), keep=True)
    shown = compared(run / "student", 6, teacher=teacher.pop("samples"))
    before, after = result["before"], result["after"]
    left, gained, passed = gate(before, after)
    summary = {
        "job": name,
        "before": before,
        "after": after,
        "teacher": teacher,
        "prompts": count,
        "judged": before["judged"],
        "kl_left": left,
        "accuracy_gained": gained,
        "passed": passed,
        "train_tokens": result["response_tokens"],
        "train_seconds": train_seconds,
        "seconds": time.monotonic() - begin,
        "seed": seed,
        "checkpoint": result["checkpoint"],
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    console.print(table(summary, job.figure))
    if shown is not None:
        console.print(shown)
    console.print(f"{summary['train_tokens']:,} response tokens, {summary['seconds']:.0f} seconds in all; folder {run}")
    said = f"{left:.2f} of the reverse KL is left (at most {MOST_KL_LEFT:.2f}), {gained:.2f} {job.figure} gained"
    console.print(f"{said} (more than {LEAST_GAIN}): {'passed' if passed else 'FAILED'}")
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        typer.run(real)
    except OpdError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
