"""The evaluations of a run: before the first step, every eval.every steps, and after the last one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from student.data.mode_figures import describe_modes, recovery
from student.data.report import EvalReport
from student.job.job import Job
from student.report.samples import entries


class Evaluations:
    """Evaluates on the recipe's held-out prompts, and logs the results.

    Args:
        job: gives services, prompts and settings.
        log: called with a line for the console.
        write: called with lines for samples.jsonl.
        start: the evaluation before the first step, against which recoveries are measured; None if it is to come.
    """

    def __init__(
        self,
        job: Job,
        log: Callable[[str], None],
        write: Callable[[Sequence[Mapping[str, Any]]], None],
        start: EvalReport | None,
    ) -> None:
        self._job, self._log, self._write = job, log, write
        self._settings = job.recipe.eval
        self._start = start

    def due(self, steps: int) -> bool:
        """Whether an evaluation is due after `steps` steps; the final one, after the last step, is not included."""
        every = self._settings.every
        return steps < self._job.recipe.train.steps and every > 0 and steps % every == 0

    def run(self, label: str, step: int) -> EvalReport | None:
        """Evaluate the weights after `step` steps and keep some answers; None if the recipe has evaluation off."""
        settings = self._settings
        if settings.prompts == 0:
            return None
        report = self._job.services.evaluate(
            self._job.source.prompts("heldout", settings.prompts),
            seed_names=("heldout",),
            samples=settings.samples,
            reverse_kl=settings.reverse_kl,
            temperature=settings.temperature,
            purpose=None,
            keep=self._job.recipe.samples.count,
            leakage=settings.leakage,
            slack=settings.mode_slack,
        )
        self._start = self._start or report  # the first one stays
        gained = recovery(report.modes, self._start.modes, self._job.recipe.modes)
        report = replace(report, modes={**report.modes, **gained})
        self._write(entries(report.samples, step=step, label=label))
        self._log(f"evaluation ({label}): {describe(report)}")
        if report.modes:
            self._log(f"modes ({label}): {describe_modes(report.modes)}")
        return report


def describe(report: EvalReport) -> str:
    """The figures of an evaluation in one line."""
    divergence = ""
    if report.reverse_kl is not None:
        divergence = f", reverse KL {report.reverse_kl:.4f} nats per token ({report.reverse_kl_estimator})"
    passes = "".join(f", pass@{k} {_with_interval(*found)}" for k, found in report.pass_at.items() if k > 1)
    parts = ", ".join(f"{name.partition('/')[2]} {value:.3f}" for name, value in _by_domain(report).items())
    domains = f" ({parts})" if parts else ""
    accuracy = _with_interval(report.accuracy, report.accuracy_half_width)
    accuracy += f" of {report.judged} judged" if report.judged else ""
    return f"accuracy {accuracy}{domains}{passes}{divergence}"


def _with_interval(value: float, half: float | None) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.3f}" if half is None else f"{value:.3f} ± {half:.3f}"


def metrics_of(report: EvalReport) -> dict[str, float]:
    """The figures of an evaluation as metrics of a step; unknown figures are left out."""
    metrics = {"eval/response_length": report.mean_length, "eval/repetition": report.repetition, **_by_domain(report)}
    metrics |= {f"mode/{name}": value for name, value in report.modes.items()}
    metrics |= {f"eval/pass_at_{k}": value for k, (value, _) in report.pass_at.items() if k > 1}
    if not math.isnan(report.accuracy):
        metrics["eval/accuracy"] = report.accuracy
        if report.accuracy_half_width is not None:
            metrics["eval/accuracy_half_width"] = report.accuracy_half_width
    if report.reverse_kl is not None:
        metrics["eval/reverse_kl"] = report.reverse_kl
    if report.reverse_kl_per_byte is not None:
        metrics["eval/reverse_kl_per_byte"] = report.reverse_kl_per_byte
    return metrics


def to_json(report: EvalReport) -> dict[str, Any]:
    """The report as JSON values without its figures per prompt, for summaries and checkpoints."""
    return {
        "accuracy": None if math.isnan(report.accuracy) else report.accuracy,
        "judged": report.judged,
        "accuracy_half_width": report.accuracy_half_width,
        "pass_at": {str(k): list(found) for k, found in report.pass_at.items()},
        "mean_length": report.mean_length,
        "truncated": report.truncated,
        "repetition": report.repetition,
        "reverse_kl": report.reverse_kl,
        "bytes_per_token": report.bytes_per_token,
        "reverse_kl_estimator": report.reverse_kl_estimator,
        "tokens": report.tokens,
        "modes": dict(report.modes),
        "by_domain": {name: list(found) for name, found in report.by_domain.items()},
    }


def from_json(data: dict[str, Any]) -> EvalReport:
    """The report from the values of `to_json`."""
    accuracy = math.nan if data["accuracy"] is None else data["accuracy"]
    passes = {int(k): (value, half) for k, (value, half) in data["pass_at"].items()}
    return EvalReport(**{**data, "accuracy": accuracy, "pass_at": passes}, per_prompt=())


def _by_domain(report: EvalReport) -> dict[str, float]:
    """The accuracy of each domain, if there are several."""
    if len(report.by_domain) < 2:
        return {}
    return {f"domain_accuracy/{name}": accuracy for name, (accuracy, _) in report.by_domain.items()}
