"""`opd orbit RECIPE`: trains one student with several thinking budgets, stage by stage."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.printable import echo
from student.job.arguments import Overrides

if TYPE_CHECKING:
    from student.orbit.recipe import OrbitRecipe
    from student.settings.recipe import Recipe


def orbit(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="Recipe with modes, stages, merge and fusion.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the recipes of all stages without training.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue where an earlier run of the recipe stopped.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="With --dry-run: load neither the student's tokenizer nor prompts.")
    ] = False,
) -> None:
    """Train a student by RL once per thinking budget, merge the results, and fuse them by on-policy distillation.

    Every stage is an ordinary student job in RUN/stages, and `opd train` can run its recipe separately. Ctrl-C saves
    the stage; --resume continues from there.
    """
    from opd.config import load_settings
    from opd.errors import ConfigError
    from student.orbit.recipe import OrbitRecipe

    if offline and not dry_run:
        raise ConfigError("--offline can only be used with --dry-run: a run needs its student and prompts.")
    job = load_settings(OrbitRecipe, recipe, overrides or ())
    _check(job, offline=offline, show=dry_run)
    if dry_run:
        return
    from student.orbit.driver import run_orbit

    state = run_orbit(job, resume=resume, log=echo)
    echo(f"student: {state.checkpoints['fusion']}")
    for warning in state.warnings.values():
        echo(f"warning: {warning}")


def _check(job: "OrbitRecipe", *, offline: bool, show: bool) -> None:
    """Check all recipes, their plug-ins, lengths and marks, so that no stage fails hours after the start.

    Args:
        job: the recipe.
        offline: skip the checks that need the student's tokenizer or the prompts.
        show: print the recipe of every stage.

    Raises:
        OpdError: for the first problem found.
    """
    from opd.config.text import write_yaml
    from opd.extras import require
    from student.job.plugins import build_plugins
    from student.orbit.recipe import FUSION, MERGE, fusion_recipe, merge_settings, rl_recipe

    # Models that do not exist yet have placeholder names in angle brackets, so that later stages can be checked too.
    if not job.stage_folder(MERGE).exists():
        require("merging the teachers of the modes", "mergekit", "merge")
    first, *_ = job.trained
    recipes = {mode: rl_recipe(job, mode, job.model.path if mode == first else f"<{mode}>") for mode in job.trained}
    recipes[FUSION] = fusion_recipe(job, "<merge>", job.teachers.endpoints or ["localhost:7070"])
    merged = merge_settings(job, {mode: f"<{mode}>" for mode in job.trained})
    for stage, found in recipes.items():
        build_plugins(found)
        if show:
            if stage == FUSION:
                echo(f"# merge\n{write_yaml(merged.model_dump(mode='json'))}")
            echo(f"# stage {stage}\n{write_yaml(found.model_dump(mode='json', exclude_defaults=True))}")
    if offline:
        return
    from opd.tasks.build import build_prompts
    from opd.tasks.modes import check_marks
    from student.model.model import load_tokenizer

    tokenizer = load_tokenizer(job.model.path, job.model.revision)
    if not job.teachers.endpoints:
        _check_length(job, recipes[FUSION])
    source = build_prompts(job.prompts, seed=job.seed)
    try:
        check_marks(job.modes, source.prompts("train", 1)[0], tokenizer)
    finally:
        source.close()


def _check_length(job: "OrbitRecipe", fusion: "Recipe") -> None:
    """Check that teachers served on this machine, which have the student's shape, have enough positions to score rows.

    Raises:
        ConfigError: if a row of the fusion may be longer.
    """
    from opd.errors import ConfigError
    from opd.lengths import most_positions
    from opd.pretrained import read_config

    positions = most_positions(read_config(job.model.path, revision=job.model.revision))
    longest = fusion.rollout.longest_sequence(fusion.rollout.max_prompt_tokens)
    if positions and longest > positions:
        raise ConfigError(
            f"stage fusion: rollouts may have {longest} tokens (rollout.max_prompt_tokens + the largest budget), but "
            f"the teachers, like model.path, have {positions} positions; lower one of them."
        )
