"""`opd lab`: reproduce the papers' claims in the tiny world, or put a question of one's own to it.

opd lab list
opd lab run baselines --quick
opd lab run mine.py                 # a file with an EXPERIMENT; docs/lab.md has one
opd lab premise exopd               # only what the method assumes, before any arm runs
opd lab report
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from opd.printable import echo
from opd.signals import NOTICES, stop_signals

app = typer.Typer(no_args_is_help=True, help="Test the papers' claims in tiny worlds.")

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME|FILE.py]...", help="Names of experiments, or .py files of your own. Default: all."),
]
Root = Annotated[Path, typer.Option("--root", help="Folder in which the lab keeps its models and runs.")]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Use the short form, which only shows that everything works, in a minute or two."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder of the report; results.md and results/ are written there. [default: docs; for the short form and "
        "for files of your own, report below the root]",
        show_default=False,
    ),
]
DEFAULT_ROOT = Path("runs/lab")


@app.command("list")
def list_experiments() -> None:
    """List the experiments."""
    from opd.console import Console, Table
    from opd_lab.experiments import NAMES, load_experiment

    table = Table()
    for column in ("", "name", "title", "world", "runs"):
        table.add_column(column)
    for name in NAMES:
        experiment = load_experiment(name)
        runs = len(experiment.arms) * len(experiment.replicates)
        swept = sum(len(arm.learning_rates) for arm in experiment.arms if arm.same_rate_as is None)
        table.add_row(experiment.letter, name, experiment.title, experiment.world, f"{runs} + {swept} of the sweep")
    Console().print(table)


@app.command()
def run(
    names: Names = None,
    arms: Annotated[str, typer.Option("--arms", help="Run only these arms, separated by commas.")] = "",
    jobs: Annotated[
        int, typer.Option("--jobs", min=1, help="Number of runs in parallel, each a process with one thread.")
    ] = 2,
    root: Root = DEFAULT_ROOT,
    quick: Quick = False,
) -> None:
    """Run experiments. Finished runs are kept and interrupted ones continue, even if the folder was moved."""
    from opd_lab.experiments import NAMES, load_experiment

    log = _prepare()
    form = "quick" if quick else "full"
    experiments = [load_experiment(name) for name in names or NAMES]
    chosen = [name for name in arms.split(",") if name]
    for experiment in experiments:
        for name in chosen:
            experiment.arm(name)
    # Imported after all checks, because importing torch takes seconds.
    from opd_lab.runner import make_plan, run_experiment

    for experiment in experiments:
        log(f"({experiment.letter}) {experiment.title}; worlds are built where they are missing, in minutes")
        plan = make_plan(experiment, root.resolve(), form, jobs=jobs, log=log)
        results = run_experiment(plan, jobs=jobs, arms=chosen, log=log)
        for claim in results["claims"]:
            if chosen and claim["outcome"] == "incomplete":
                continue  # about arms that were not asked for
            log(f"  {claim['outcome']:>14}: {claim['claim']}, {claim['scope'] or 'not judged'}{_numbers(claim)}")


@app.command()
def premise(names: Names = None, root: Root = DEFAULT_ROOT, quick: Quick = False) -> None:
    """Measure what the experiments' methods assume about their worlds, without running an arm."""
    from opd_lab.experiments import NAMES, load_experiment

    log = _prepare()
    experiments = [load_experiment(name) for name in names or NAMES]
    from opd_lab.premises import measure_premises
    from opd_lab.runner import make_plan

    for experiment in experiments:
        if not experiment.premises:
            log(f"{experiment.name} has no premise to measure")
            continue
        for finding in measure_premises(make_plan(experiment, root.resolve(), "quick" if quick else "full"), log):
            log(f"{finding.name}: {'present' if finding.present else 'absent'} ({finding.text})")


@app.command()
def report(names: Names = None, root: Root = DEFAULT_ROOT, out: Out = None, quick: Quick = False) -> None:
    """Write results.md, plots and a JSON file per experiment from the finished runs."""
    from opd_lab.experiments import NAMES, load_experiment

    for name in names or ():
        load_experiment(name)
    from opd_lab.report import write_report

    own = quick or any(name not in NAMES for name in names or ())
    target = out or (root / "report" if own else Path("docs"))
    form = "quick" if quick else "full"
    for path in write_report(root.resolve(), target, form=form, names=tuple(names or NAMES)):
        echo(path)


def _stop(number: int, frame: Any) -> None:
    for notice in NOTICES if number in NOTICES else ():
        signal.signal(notice, signal.SIG_IGN)  # a scheduler repeats them
    sys.exit(128 + number)


def _prepare() -> Any:
    """Set up the process, and return a function that prints a line.

    A signal to stop raises SystemExit, so that runs save their state and servers stop, as after Ctrl-C.
    """
    from opd.console import Console

    for asked in set(stop_signals()) - {signal.SIGINT}:
        signal.signal(asked, _stop)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, whose threads would otherwise compete for the cores
    console = Console()
    return lambda line: console.print(line, highlight=False, soft_wrap=True, markup=False)


def _numbers(claim: dict[str, Any]) -> str:
    interval = claim["interval"]
    if interval is None:
        return f" ({claim['why']})" if claim["why"] else ""
    return f" ({interval['mean']:.3g}, 95 % from {interval['low']:.3g} to {interval['high']:.3g})"
