"""`opd train --dry-run`: everything that can be checked without training."""

import yaml

from opd.tasks.build import build_prompts
from opd.tasks.source import PromptSource
from student.plugins import build_plugins
from student.recipe import Recipe
from student.run.folder import RunFolder
from student.scoring.needs import Needs
from student.scoring.prompt_check import check_prompts


def check(recipe: Recipe, *, offline: bool, resume: bool = False) -> str:
    """Validate a recipe and return its resolved form with what the objective needs.

    Args:
        recipe: the recipe.
        offline: leave out what needs teachers, data or the student's tokenizer.
        resume: the run would be resumed.

    Raises:
        OpdError: for the first thing that would stop the run.
    """
    if resume:
        RunFolder.reopen(recipe)
    else:
        RunFolder.refuse_existing(recipe.run)
    plugins = build_plugins(recipe)
    lines = [yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), _describe(plugins.needs)]
    if not offline:
        source = build_prompts(recipe.prompts, seed=recipe.seed)
        try:
            check_prompts(recipe, plugins.needs, source)
            lines.append(_shake_hands(recipe, plugins.needs, source))
        finally:
            source.close()
    return "\n".join(lines)


def _shake_hands(recipe: Recipe, needs: Needs, source: PromptSource) -> str:
    from student.job import connect
    from student.learning.model import load_tokenizer
    from student.scoring.handshake import shake_hands

    fleet = connect(recipe) if needs.signals else None
    if fleet is None:
        return "no teachers needed"
    with fleet:
        infos = shake_hands(fleet, recipe, needs, load_tokenizer(recipe.model.path, recipe.model.revision), source)
    return "\n".join(f"teacher {name}: {info.engine}, {info.model}, fits" for name, info in infos.items())


def _describe(needs: Needs) -> str:
    wanted = [
        f"{need.spec.kind}" + (f"({need.spec.k})" if need.spec.k else "") + f" from the {need.role}"
        for need in needs.signals
    ]
    return "needs: " + (", ".join(wanted) or "no teacher") + ("; rewards" if needs.reward else "")
