"""`opd premise`: can a method pay on this student and these teachers? Nothing is trained."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from student.arguments import Overrides

if TYPE_CHECKING:
    from student.lab.predict import PremiseReport


def premise(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE.yaml", help="Student, teachers and prompts; its methods are left aside.")
    ],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", help="Answers to measure on, at least 8.")] = 64,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the figures as JSON.")] = None,
) -> None:
    """Predict from a few scored answers whether distillation and rollout windows can pay, before a run is paid for."""
    import json
    from dataclasses import asdict

    from opd.config import load_settings
    from student.lab.predict import measure, verdicts
    from student.model_path import check_model_path
    from student.recipe import Recipe

    job = load_settings(Recipe, recipe, overrides or ())
    check_model_path(job.model.path, job.model.revision)
    report = measure(job, rows=rows)
    _show(report)
    for sentence in verdicts(report):
        typer.echo(sentence)
    if out is not None:
        out.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def _show(report: "PremiseReport") -> None:
    accuracy = "unknown" if math.isnan(report.accuracy) else f"{report.accuracy:.3f}"
    typer.echo(f"{report.rows} answers of {report.length:.1f} tokens on average, accuracy {accuracy}")
    typer.echo(
        f"reverse KL {report.reverse_kl:.4f} nats per token (log-ratio of sampled tokens); by decile of the answer:"
    )
    typer.echo("  reverse KL      " + " ".join(f"{value:6.3f}" for value in report.by_decile))
    typer.echo("  teacher's first " + " ".join(f"{value:6.3f}" for value in report.agreement))
    for window in report.windows:
        typer.echo(
            f"  first {window.tokens} tokens: cosine {window.published:.2f} published, {window.cross_fitted:.2f} "
            f"cross-fitted, {window.random:.2f} of as many random tokens"
        )
