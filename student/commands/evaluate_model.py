"""`opd eval`: evaluates a model on a recipe's held-out prompts, with the rollouts and measures that training uses."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from opd.errors import ConfigError
from student.data.needs import STUDENT
from student.job.evaluation import to_json
from student.job.job import build_job
from student.run.interrupts import Interrupts
from student.settings.recipe import Recipe


def evaluate_model(
    recipe: Recipe, model: str, *, keep: bool = False, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Evaluate `model`: accuracy (also by domain), response length, truncation and, with teachers, reverse KL.

    Args:
        recipe: gives prompts, limits, seed and the `eval` group. Its objective decides which teachers are asked;
            without eval.reverse_kl none are.
        model: folder or hub id of the model.
        keep: include every answer under "samples", in the form of `student.report.samples.sample_of`.
        log: called with a line of progress from time to time.

    Returns:
        A report that can be written as JSON. Accuracy is None if no verdict is known.

    Raises:
        ConfigError: if eval.prompts is 0, or reverse KL would be measured to a model that exists only within a run.
        OpdError: as `train` would.
    """
    if recipe.eval.prompts == 0:
        raise ConfigError(
            "eval.prompts is 0, so nothing would be evaluated; set it to the number of held-out prompts to use."
        )
    recipe = _evaluated(recipe)
    begin = time.monotonic()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts(starting=True))
        job = build_job(recipe, stack, model_path=model, poll=interrupts.poll, log=log)
        kept = sorted(job.models.local - {STUDENT})
        if kept:
            raise ConfigError(f"model {kept[0]!r} exists only within a run; set eval.reverse_kl=false.")
        job.local.kept.start(job.models.local)
        result = job.services.evaluate(
            job.source.prompts("heldout", recipe.eval.prompts),
            seed_names=("heldout",),
            samples=recipe.eval.samples,
            reverse_kl=recipe.eval.reverse_kl,
            temperature=recipe.eval.temperature,
            slack=recipe.eval.mode_slack,
            keep=recipe.eval.prompts * recipe.eval.samples if keep else 0,
        )
    figures = to_json(result)
    return {
        "model": model,
        **{name: figures[name] for name in ("accuracy", "accuracy_half_width", "judged", "pass_at", "reverse_kl")},
        "reverse_kl_per_byte": result.reverse_kl_per_byte,
        "reverse_kl_estimator": result.reverse_kl_estimator,
        "domains": {
            name: {"accuracy": accuracy, "prompts": count} for name, (accuracy, count) in result.by_domain.items()
        },
        "modes": dict(result.modes),
        "mean_length": result.mean_length,
        "truncated": result.truncated,
        "repetition": result.repetition,
        "prompts": len(result.per_prompt),
        "tokens": result.tokens,
        "seconds": time.monotonic() - begin,
        **({"samples": list(result.samples)} if keep else {}),
    }


def _evaluated(recipe: Recipe) -> Recipe:
    """The recipe without the settings that matter only to training, so that none of them can fail an evaluation."""
    changes: dict[str, Any] = {
        "methods": [],
        "rollout": recipe.rollout.model_copy(update={"strategy": {"name": "single"}}),
        "train": recipe.train.model_copy(update={"max_staleness": 0}),
    }
    if not recipe.eval.reverse_kl:  # the teachers may be away
        changes |= {"objective": [{"name": "sft", "rows": "all"}], "rewards": [], "teachers": None, "contexts": {}}
    return recipe.model_copy(update=changes)
