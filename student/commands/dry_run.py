"""`opd train --dry-run`: everything that can be checked without training."""

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.config.text import write_yaml
from opd.tasks.build import build_prompts
from opd.tasks.source import PromptSource
from opd.tasks.stops import generation_stops, stop_set
from student.data.needs import Needs
from student.job.plugins import Plugins, build_plugins
from student.job.prompt_check import can_judge, check_contexts, check_prompts
from student.report.telemetry import check_port
from student.run.changes import changed_contents, changed_teachers
from student.run.folder import RunFolder
from student.run.space import tight
from student.settings.recipe import Recipe

if TYPE_CHECKING:
    from student.scoring.handshake import RunModels


def check(recipe: Recipe, *, offline: bool, resume: bool = False, whole: bool = False) -> str:
    """Check a recipe as far as possible without loading the student's weights.

    Args:
        recipe: the recipe.
        offline: skip the checks that need teachers, data or the student's tokenizer.
        resume: check the recipe as for a run that is resumed from its newest checkpoint.
        whole: show the resolved recipe too.

    Returns:
        Lines for the user: what the objective needs from teachers, notes and warnings, unless offline the first prompt,
        the teachers and the plan of memory and time, and the resolved recipe as YAML if it is asked for.

    Raises:
        OpdError: for the first problem that would stop the run.
    """
    weights = None
    if resume:
        checkpoint = RunFolder.reopen(recipe).newest(recipe)
        weights = None if checkpoint is None else str(checkpoint / "model")
    else:
        RunFolder.check_new(recipe.run)
    check_port(recipe.metrics_port, recipe.metrics_host)
    plugins = build_plugins(recipe)
    lines = [f"needs: {plugins.needs.describe()}"]
    lines += [f"note: {remark}" for remark in [*plugins.remarks, *_tried(plugins)]]
    if not offline:
        source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
        try:
            if resume:
                changes = changed_contents(RunFolder(recipe.run), source.contents())
                lines += [f"warning: {change}" for change in changes]
            lines += _try_out(recipe, plugins, source, weights)
        finally:
            source.close()
    lines += [write_yaml(recipe.model_dump(mode="json"))] if whole else []
    return "\n".join(lines)


def _tried(plugins: Plugins) -> Iterator[str]:
    from student.learning.tryout import try_terms

    yield from try_terms(plugins.terms)


def _try_out(recipe: Recipe, plugins: Plugins, source: PromptSource, weights: str | None) -> Iterator[str]:
    """The checks that need the student's tokenizer, the prompts and the teachers, with lines for the user.

    `weights` is the model folder of the checkpoint that a resumed run continues from; None for a new run.
    """
    from opd.pretrained import check_tensors, read_config
    from student.data.prompts import fit_prompts, preview
    from student.job.family_check import check_family, check_positions
    from student.job.preparation import check_model
    from student.model.model import Weights, load_tokenizer
    from student.scoring.contexts import Contexts
    from student.scoring.stops import foreign_stops, map_of
    from student.sizing.hardware import here
    from student.sizing.plan import describe, shape_of

    model = Weights.of(recipe.model, weights)
    tokenizer = load_tokenizer(model.base, model.revision)
    check_tensors(Path(model.base).expanduser(), read_config(model.base, revision=model.revision))
    fit_prompts(recipe, source, tokenizer)
    check_prompts(recipe, plugins, source)
    check_model(plugins, model)
    check_family(plugins, recipe.model, model)
    yield from (f"note: {note}" for note in check_positions(recipe, plugins, model))
    needs = plugins.needs
    if recipe.eval.prompts and not can_judge(source.prompts("heldout", recipe.eval.prompts), source):
        yield "note: no held-out prompt has a reference answer, so accuracy will be unknown"
    stops = stop_set(tokenizer, generation_stops(model.base, model.revision), recipe.rollout.stop_tokens)
    yield stops.describe()
    # Only from here on are the servers needed. All checks that do without them come before.
    models = _shake_hands(recipe, needs, source, tokenizer, stops.ids)
    first = source.prompts("train", 1)[0]
    map_of(recipe, stops.ids, models.alike, needs)
    yield from foreign_stops(recipe, stops.ids, models.alike, tokenizer)
    yield preview(first, tokenizer, models.alike)
    yield from (translator.preview(first) for translator in models.translators.values())
    yield from [f"teacher {name}: {info.engine}, {info.model}, compatible" for name, info in models.infos.items()]
    if weights is not None:
        yield from [f"warning: {change}" for change in changed_teachers(recipe, models.infos)]
    yield from [f"model {name}: {_IN_PROCESS[name]}, computed in process" for name in sorted(models.local)]
    contexts = Contexts(recipe.contexts, tokenizer, recipe.rollout.max_prompt_tokens)
    check_contexts(recipe, contexts, source, tokenizer)
    yield from [f"{name} reads: {tokenizer.decode(contexts.encode(name, first))!r}" for name in recipe.contexts]
    if not models.infos and not models.local:
        yield "no teachers needed"
    yield from describe(recipe, here())
    shape = shape_of(recipe, here())
    checkpoint = shape.weight_bytes + 2 * shape.trained_bytes  # and the moments of the optimizer
    if said := tight(recipe.run, checkpoint, recipe.train.keep_checkpoints):
        yield f"warning: {said}"


def _shake_hands(
    recipe: Recipe, needs: Needs, source: PromptSource, tokenizer: Any, stops: Collection[int]
) -> "RunModels":
    from student.job.preparation import connect
    from student.scoring.handshake import shake_hands

    fleet = connect(recipe) if needs.served else None
    with fleet if fleet is not None else nullcontext():
        return shake_hands(fleet, recipe, needs, tokenizer, source, stops)


_IN_PROCESS = {
    "student": "the student's current weights",
    "initial": "the student's first weights",
    "ema": "the moving average of the student's weights",
}
