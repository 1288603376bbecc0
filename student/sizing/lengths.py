"""Estimates how many tokens models read for a row.

A row is one sequence, unless it is an episode whose history is cut: then it is a sequence for each window.

    history n          turns are taken to be equally long and to fill the row: max_new_tokens / turns tokens for a turn
                       and its answer; the first window has n + 1 turns, and each later turn adds a window
    history summary    windows of context_tokens; from the second on, each begins with a summary of maximal length

All windows of an episode share a micro-batch, even if together they exceed train.micro_batch_tokens.
"""

import math
from dataclasses import dataclass

from student.settings.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Lengths:
    """The tokens that models read for a row.

    Attributes:
        sequences: number of windows; 1 unless the row is an episode whose history is cut.
        width: tokens of the longest window, prompt included.
        positions: tokens of all windows, prompts included.
        prefilled: tokens of the contexts that are read again before turns, in addition to the prompt; 0 for an answer
            that is written in one go.
        context: mean number of tokens before a sampled token.
    """

    sequences: int
    width: int
    positions: float
    prefilled: float
    context: float


def lengths_of(recipe: Recipe, prompt: float, mean: float) -> Lengths:
    """Estimate what is read for a row with a prompt of `prompt` tokens and a response of `mean`; see the module."""
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
    """What is read for a row with the longest prompt and response that the recipe allows."""
    return lengths_of(recipe, recipe.rollout.max_prompt_tokens, recipe.rollout.max_new_tokens)
