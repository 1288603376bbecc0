"""`opd answers`: a model's answers to a recipe's training prompts, for SFT, cold starts and offline distillation."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.printable import echo
from student.job.arguments import Overrides

if TYPE_CHECKING:
    from student.settings.recipe import Recipe


def answers(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE.yaml", help="Recipe whose prompts, lengths, stop tokens and seed are used."),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Folder or hub id of the model that answers. A teacher server only scores and cannot answer.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Output file, one JSON object per line.")] = Path("answers.jsonl"),
    how: Annotated[
        str,
        typer.Option(
            "--how",
            help="How answers are chosen. greedy: at temperature 0; sampled: one draw; verified: the first of --draws "
            "that the verifier calls correct, leaving out prompts without one; best: the best of --draws by verdict, "
            "then by probability.",
        ),
    ] = "greedy",
    draws: Annotated[
        int, typer.Option("--draws", min=1, help="Maximum number of draws per prompt, for verified and best.")
    ] = 8,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Sampling temperature; greedy does not use it.")
    ] = 1.0,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts",
            min=1,
            help="Number of training prompts to answer, from the first on. Default: all that the run uses.",
        ),
    ] = None,
) -> None:
    """Write a model's answers to the training prompts of a recipe.

    To learn from them, a recipe uses objective sft and method {name: expert_rows, share: 1.0, source: file, file: OUT},
    with `missing: drop` for verified answers. Prints the cost of the answers in tokens, including discarded ones.
    """
    from opd.config import load_settings
    from opd.errors import ConfigError
    from opd.tasks import build_prompts
    from opd.tasks.modes import asked_content
    from student.commands.answers import check_how, write_answers
    from student.data.prompts import fit_prompts
    from student.model.model_path import check_model_path
    from student.settings.recipe import Recipe

    way = check_how(how)
    if model is None:
        raise ConfigError("no model was named; give the folder or hub id of the model that answers with --model.")
    if not 0 < temperature <= 10:
        raise ConfigError(f"--temperature is {temperature:g}; set it above 0 and at most 10, or use --how greedy.")
    job = load_settings(Recipe, recipe, overrides or ())
    check_model_path(model)
    _check_out(out, job)
    # Imported after all checks, because importing torch takes seconds.
    from student.model.model import Weights, load_tokenizer

    source = build_prompts(job.prompts, seed=job.seed, modes=job.modes)
    try:
        # A run drops overlong prompts first. Without the same step, the stream would yield other prompts than the run.
        weights = Weights.of(job.model, None)
        fit_prompts(job, source, load_tokenizer(weights.base, weights.revision))
        count = prompts or job.train.steps * job.rollout.prompts_per_step
        # The training stream repeats the prompts of a table: each is answered once.
        asked = list({asked_content(prompt): prompt for prompt in source.prompts("train", count)}.values())
        found = write_answers(job, source, asked, model, out, how=way, draws=draws, temperature=temperature, log=echo)
    finally:
        source.close()
    correct = "unknown" if found.correct is None else f"{found.correct:.3f}"
    echo(f"{out}: {found.answered} of {found.prompts} prompts answered, correct {correct}")
    echo(f"tokens: {found.tokens} in the file, {found.drawn} drawn")


def _check_out(out: Path, job: "Recipe") -> None:
    """Check that `--out` is neither a folder nor a file that the recipe's prompts are read from.

    Raises:
        ConfigError: if it is.
        OutputError: if it cannot be written.
    """
    from opd.errors import ConfigError
    from opd.files import check_writable
    from opd.tasks.settings import files_of

    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it.")
    if any(out.resolve().is_relative_to(path.resolve()) for path in files_of(job.prompts)):
        raise ConfigError(
            f"--out {out} is a file of the recipe's prompts, which would be overwritten; name another one."
        )
    check_writable(out, f"--out {out}")
