"""How long what models read is: a row is one sequence, or one for each window of an episode whose history is cut.

    history n          t = max_new_tokens / turns tokens a turn with its answer, as if turns were alike and filled the
                       row; a window of n + 1 turns, and one more for each later turn
    history summary    windows of context_tokens; from the second on each begins with a summary of its longest

All windows of an episode share a micro-batch, also where they are over train.micro_batch_tokens.
"""

import math
from dataclasses import dataclass

from student.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is read of a row.

    Attributes:
        sequences: its windows.
        width: tokens of the longest, prompt included.
        positions: tokens of all, prompts included.
        prefilled: tokens read anew before turns, on top of the prompt; 0 where an answer is written in one go.
        context: tokens before a token that is sampled, mean.
    """

    sequences: int
    width: int
    positions: float
    prefilled: float
    context: float


def lengths_of(recipe: Recipe, prompt: float, mean: float) -> Lengths:
    """What is read of a row with a prompt of `prompt` tokens and a response of `mean`; see the module."""
    rollout, episodes = recipe.rollout, recipe.rollout.episodes
    a_turn = rollout.max_new_tokens / episodes.turns
    turns = mean / a_turn
    if isinstance(episodes.history, int):
        seen = min(mean, (episodes.history + 1) * a_turn)
        count = max(1, math.ceil(turns - episodes.history))
        width = prompt + seen
        positions = count * width
    elif episodes.summarised is not None:
        # At least a token of each window is new, however short the limit.
        fresh = max(1.0, episodes.summarised - prompt - episodes.summary.tokens)
        beyond = max(0.0, prompt + mean - episodes.summarised)
        count = min(1 + math.ceil(beyond / fresh), episodes.summary.most + 1)
        width = min(prompt + mean, float(episodes.summarised))
        positions = count * prompt + mean + (count - 1) * episodes.summary.tokens
    else:
        return Lengths(1, math.ceil(prompt + mean), prompt + mean, 0.0, prompt + mean / 2)
    context = prompt + (width - prompt) / 2 if count == 1 or episodes.summarised else width - a_turn / 2
    return Lengths(count, math.ceil(width), positions, turns * context, context)


def largest(recipe: Recipe) -> Lengths:
    """Of a row with the longest prompt and response."""
    return lengths_of(recipe, recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens)
