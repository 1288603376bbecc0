"""`opd premise`: predicts whether methods can pay on a recipe's student and teachers, without training."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.files import check_out, write_out
from opd.printable import echo
from student.job.arguments import Overrides

if TYPE_CHECKING:
    from opd_lab.predict import PremiseReport
    from opd_lab.predict_weights import WeightsReport


def premise(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE.yaml", help="Recipe with student, teachers and prompts; its methods are ignored."
        ),
    ],
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option("--rows", min=8, help="Number of answers to measure on.")] = 64,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="MODEL",
            help="Folder or hub id of the teacher's weights, to predict ExOPD and EffOPD too.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", metavar="MODEL", help="Folder or hub id of ExOPD's reference model. Default: the student."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write the figures to as JSON as well.")] = None,
) -> None:
    """Predict from a few answers which methods can help, before spending a run on them."""
    import json
    from dataclasses import asdict

    from opd.config import load_settings
    from opd.errors import ConfigError
    from student.model.model_path import check_model_path
    from student.settings.recipe import Recipe

    if out is not None:
        check_out(out)
    job = load_settings(Recipe, recipe, overrides or ())
    check_model_path(job.model.path)
    if reference is not None and teacher is None:
        raise ConfigError("--reference can only be used with --teacher; give both.")
    for model in filter(None, (teacher, reference)):
        check_model_path(model)
    # Imported after all checks, because importing torch takes seconds.
    from opd_lab import predict_weights
    from opd_lab.predict import measure, verdicts

    report = measure(job, rows=rows)
    _show(report)
    echo("\n".join(verdicts(report)))
    figures = asdict(report)
    if teacher is not None:
        weights = predict_weights.measure_weights(job, teacher, reference=reference, rows=rows)
        _show_weights(weights)
        echo("\n".join(predict_weights.verdicts(weights)))
        figures["weights"] = asdict(weights)
    if out is not None:
        write_out(out, json.dumps(figures, indent=1) + "\n")


def _show(report: "PremiseReport") -> None:
    accuracy = "unknown" if math.isnan(report.accuracy) else f"{report.accuracy:.3f}"
    echo(f"{report.rows} answers of {report.length:.1f} tokens on average, accuracy {accuracy}")
    echo(f"reverse KL {report.reverse_kl:.4f} nats per token (log-ratio of sampled tokens); by decile of the answer:")
    echo("  reverse KL      " + " ".join(f"{value:6.3f}" for value in report.by_decile))
    echo("  teacher's first " + " ".join(f"{value:6.3f}" for value in report.agreement))
    for window in report.windows:
        echo(
            f"  first {window.tokens} tokens: cosine {window.published:.2f} published, {window.cross_fitted:.2f} "
            f"cross-fitted, {window.random:.2f} of as many random tokens"
        )


def _show_weights(report: "WeightsReport") -> None:
    def accuracies(found: Mapping[float, float]) -> str:
        return ", ".join(f"{place:g}: {accuracy:.3f}" for place, accuracy in found.items())

    echo(f"accuracy of T^lambda R^(1 - lambda), lambda {accuracies(report.scales)}")
    if report.places:
        echo(f"accuracy on the line from student (0) to teacher (1), {accuracies(report.places)}")
