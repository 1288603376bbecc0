"""`opd lab`: reproduce the papers' claims in the tiny world.

opd lab list
opd lab run windows_restate --quick
opd lab report
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Reproduce the claims of the papers in the tiny world.")

Root = Annotated[Path, typer.Option("--root", help="Folder of the lab's models and runs.")]
Quick = Annotated[bool, typer.Option("--quick", help="The short form: a minute or two, shows that everything runs.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the report; results.md and results/ are written there. [default: docs; with --quick, report "
        "below the root]",
        show_default=False,
    ),
]
DEFAULT_ROOT = Path("runs/lab")


@app.command("list")
def list_experiments() -> None:
    """Show the experiments."""
    from rich.console import Console
    from rich.table import Table

    from student.lab.experiments import NAMES, load_experiment

    table = Table()
    for column in ("", "name", "title", "runs"):
        table.add_column(column)
    for name in NAMES:
        experiment = load_experiment(name)
        runs = len(experiment.arms) * len(experiment.seeds)
        swept = sum(len(arm.learning_rates) for arm in experiment.arms if arm.same_rate_as is None)
        table.add_row(experiment.letter, name, experiment.title, f"{runs} + {swept} of the sweep")
    Console().print(table)


@app.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments; all when none is named.")] = None,
    arms: Annotated[str, typer.Option("--arms", help="Only these arms, separated by commas.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Runs at a time, one process and thread each.")] = 2,
    root: Root = DEFAULT_ROOT,
    quick: Quick = False,
) -> None:
    """Run experiments; finished runs are kept, interrupted ones go on."""
    from rich.console import Console

    from student.lab.experiments import NAMES, load_experiment
    from student.lab.runner import run_experiment
    from student.lab.world import open_world

    # SIGTERM like Ctrl-C: runs save, servers stop.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers: threads of one process fight those of the others
    console = Console()
    form = "quick" if quick else "full"

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    experiments = [load_experiment(name) for name in names or NAMES]
    chosen = [name for name in arms.split(",") if name]
    for experiment in experiments:
        for name in chosen:
            experiment.arm(name)
    say("building the tiny world where it is missing (many minutes for the full form)")
    root = root.resolve()  # recipes, by which finished runs are known, hold paths
    cast = open_world(root, form)
    for experiment in experiments:
        say(f"({experiment.letter}) {experiment.title}")
        results = run_experiment(experiment, cast, root, form=form, jobs=jobs, arms=chosen, say=say)
        for claim in results["claims"]:
            say(f"  {claim['outcome']:>14}: {claim['claim']}{_numbers(claim)}")


@app.command()
def report(root: Root = DEFAULT_ROOT, out: Out = None, quick: Quick = False) -> None:
    """Write results.md, plots and a JSON per experiment from what is finished."""
    from student.lab.report import write_report

    target = out or (root / "report" if quick else Path("docs"))
    for path in write_report(root.resolve(), target, form="quick" if quick else "full"):
        typer.echo(path)


def _numbers(claim: dict[str, Any]) -> str:
    interval = claim["interval"]
    if interval is None:
        return f" ({claim['why']})" if claim["why"] else ""
    return f" ({interval['mean']:.3g}, 95 % from {interval['low']:.3g} to {interval['high']:.3g})"
