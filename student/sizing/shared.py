"""Estimates what learning is spared where rows of one prompt share its forward and backward pass."""

from dataclasses import dataclass

from student.data.hooks import ModelHook
from student.data.prefixes import shared_tokens
from student.job.plugins import Plugins
from student.learning.micro_batches import pays
from student.settings.recipe import Recipe
from student.sizing.lengths import largest, lengths_of
from student.sizing.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Shared:
    """Rows that share prompts.

    Attributes:
        prefixes: number of prompts in the largest micro-batch.
        prefix: tokens of the longest prompt.
        sequences: number of sequences that continue them.
        rest: tokens of the longest sequence after its prompt.
        spared: mean number of positions per row that are not read again.
    """

    prefixes: int
    prefix: int
    sequences: int
    rest: int
    spared: float


def shared_of(
    recipe: Recipe, shape: ModelShape, plugins: Plugins, *, mean: float, gpu: bool, ranks: int = 1
) -> tuple[Shared | None, str]:
    """What rows share, where that pays, and otherwise the reason why not, where it would; see `MicroBatches`.

    Args:
        recipe: the job.
        shape: sizes of its student.
        plugins: its plug-ins.
        mean: mean number of tokens of a response.
        gpu: whether a rank runs on a GPU.
        ranks: number of data-parallel processes.
    """
    row, prefix, limit = largest(recipe), recipe.rollout.max_prompt_tokens, recipe.train.micro_batch_tokens
    rest, group = row.width - prefix, recipe.rollout.samples_per_prompt * row.sequences
    prefixes = max(1, limit // shared_tokens(1, prefix, group, rest))
    if not recipe.methods and recipe.rollout.strategy["name"] == "single":  # others may add to the rows of the plan
        prefixes = min(prefixes, -(-recipe.rollout.prompts_per_step // ranks))
    group = min(group, max(row.sequences, (limit - prefix) // shared_tokens(0, prefix, 1, rest)))
    read = lengths_of(recipe, prefix / 2, mean)
    spared = read.sequences * prefix / 2 * (1 - 1 / group)
    rows = prefixes * group / row.sequences
    if not pays(rows * spared, rows * read.positions, 1, shape.total, gpu=gpu) or not recipe.train.shared_prompts:
        return None, ""
    if recipe.model.dropout or any(isinstance(part, ModelHook) for part in (*plugins.controllers, *plugins.terms)):
        return None, "what acts on the layers depends on the row"
    if not shape.continues(row.width):
        return None, "the model does not reproduce its hidden states after a prompt that was read before"
    return Shared(prefixes, prefix, prefixes * group, rest, spared), ""
