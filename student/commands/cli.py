"""`opd train` and `opd eval`: student jobs from the command line."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from opd.allocator import grow_segments
from opd.files import check_out, write_out
from opd.keys_option import keys_option
from opd.printable import echo
from student.job.arguments import Overrides


def _started_again(run: Path) -> bool:
    """Whether torchrun has restarted the ranks after losing one of a run that had begun, so that it must resume."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (run / "recipe.yaml").exists()


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", help="Recipe of the student job; --keys lists its keys.")
    ],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check everything that can be checked without training: keys, plug-ins, prompts, and the handshake "
            "with the teachers, which must be running (see --offline).",
        ),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--recipe", help="With --dry-run: also print the resolved recipe, with every default.")
    ] = False,
    keys: Annotated[
        bool, keys_option("student.settings.recipe:Recipe", "Print every key of a recipe with its default, then exit.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest intact checkpoint of the run folder.")
    ] = False,
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option("--log-format", help="Form of what a run says on standard error: lines of text, or JSON objects."),
    ] = "text",
    offline: Annotated[
        bool, typer.Option("--offline", help="With --dry-run: neither contact teachers nor load prompts.")
    ] = False,
) -> None:
    """Train a student: sample, let teachers score, learn.

    RECIPE.yaml names the student, the teachers' endpoints, the prompts, the objective and the methods. Ctrl-C saves a
    checkpoint and stops (a second one stops at once). --resume continues from there, on CPU with bit-identical results
    if the teachers are served with --deterministic.
    """
    from opd.config import load_settings
    from opd.errors import ConfigError
    from opd.telemetry.logs import configure
    from student.job.plugins import build_plugins
    from student.model.model_path import check_model_path
    from student.settings.recipe import Recipe
    from student.settings.train import TrainSettings

    if log_format == "json":
        configure("json", "info", of="student")
    if offline and not dry_run:
        raise ConfigError(
            "--offline needs --dry-run, because a run needs its teachers and prompts; add --dry-run, or remove "
            "--offline."
        )
    if whole and not dry_run:
        raise ConfigError("--recipe needs --dry-run; add it, or read recipe.yaml in the folder of the run.")
    alone = dry_run or os.environ.get("WORLD_SIZE", "1") == "1"
    try:
        job = load_settings(Recipe, recipe, overrides or ())
    except Exception as error:
        if not alone:  # this rank's file may be another one
            from student.model.meeting import tell

            tell(error, TrainSettings.model_fields["rank_patience"].default)
        raise
    grow_segments(pools=job.rollout.engine.get("name") == "vllm")
    # Before the slow imports, so that a wrong plug-in setting or model name is reported at once. Of several ranks, one
    # may fail alone, so they meet before they check this.
    if alone:
        build_plugins(job)
    resume = resume or _started_again(job.run)
    if alone and not offline and not resume:
        check_model_path(job.model.path)
    if dry_run:
        from student.commands.dry_run import check

        echo(check(job, offline=offline, resume=resume, whole=whole))
        return
    from student.job.session import train as run

    summary = run(job, resume=resume)
    from opd.console import Console
    from student.report.answers import compared

    if (table := compared(Path(summary["run"]))) is not None:
        Console().print(table)
    echo(f"checkpoint: {summary['checkpoint']}")
    echo(f"run folder: {summary['run']}")


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id of the model to evaluate.")],
    recipe: Annotated[Path, typer.Option("--recipe", help="Recipe whose prompts, limits and seed are used.")],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Write the report as JSON to this file, and the answers beside it to the same name with "
            ".samples.jsonl",
        ),
    ] = None,
) -> None:
    """Evaluate a model on a recipe's held-out prompts: accuracy and reverse KL to the teachers.

    With eval.samples=8 it also gives pass@k for k up to 8. With eval.reverse_kl=false no teacher is needed.
    """
    import json

    from opd.config import load_settings
    from student.model.model_path import check_model_path
    from student.settings.recipe import Recipe

    if out is not None:
        check_out(out)
    job = load_settings(Recipe, recipe, overrides or ())
    check_model_path(model)
    grow_segments(pools=job.rollout.engine.get("name") == "vllm")
    from student.commands.evaluate_model import evaluate_model

    report = evaluate_model(job, model, keep=out is not None, log=lambda line: echo(line, err=True))
    samples = report.pop("samples", [])
    for name, value in report.items():
        shown = f"{value:.4f}" if isinstance(value, float) else "unknown" if value is None else value
        echo(f"{name}: {shown}")
    if out is not None:
        write_out(out, json.dumps(report, indent=1) + "\n")
        lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        write_out(out.with_suffix(".samples.jsonl"), lines)
