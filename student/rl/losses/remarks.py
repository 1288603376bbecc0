"""What a policy loss says at the start of a run about settings that are valid but may not do what is expected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from student.rl.origins import gives_rows, samples_as_it_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.rl.advantages.chain import AdvantageChain
    from student.rl.losses.settings import PolicyGradientSettings
    from student.settings.recipe import Recipe


def of_responses(s: PolicyGradientSettings, chain: AdvantageChain) -> list[str]:
    """A remark if the settings change the response-level loss that the advantage is the derivative of."""
    if not chain.traits.of_response or (s.ratio == "none" and s.aggregation == "constant"):
        return []
    return [
        f"advantage {chain.first.settings.name!r} is the derivative of a loss in the log-prob of whole responses, "
        f"which term {s.name!r} with ratio {s.ratio} and aggregation {s.aggregation} changes; set ratio: none and "
        "aggregation: constant"
    ]


def unweighted(s: PolicyGradientSettings, chain: AdvantageChain, recipe: Recipe) -> list[str]:
    """A remark if updates after the first would treat rows of older weights as on policy."""
    updates = recipe.train.epochs * recipe.train.minibatches
    if updates == 1 or s.ratio != "none" or chain.traits.off_policy or chain.recomputes:
        return []
    return [
        f"term {s.name!r} has ratio none, so of {updates} updates per batch all but the first treat "
        "rows of older weights as on policy; set ratio: token, or make one update"
    ]


def idle_bounds(s: PolicyGradientSettings, bounds: Sequence[str], recipe: Recipe) -> list[str]:
    """A remark if no bound of the ratio can act, because the ratio is 1 or there is none."""
    train = recipe.train
    bounded = [name for name in bounds if getattr(s, name, None) is not None]
    if s.ratio == "none":
        # A loss whose bound is `ratio` has no bound to set, but its weight is made of the ratio.
        bounded = [name if name != "ratio" else "the weight by the ratio" for name in bounded]
        return (
            [f"{' and '.join(bounded)} of term {s.name!r} can never act, because ratio none has no ratio"]
            if bounded
            else []
        )
    if not bounded or train.max_staleness or train.epochs * train.minibatches > 1:
        return []
    # A ratio to the policy that sampled is 1 only for what this very student sampled, by the same numerics.
    others = s.rows != "sampled" and gives_rows(recipe)
    if s.ratio_to == "behaviour" and (others or not samples_as_it_scores(recipe)):
        return []
    return [
        f"{' and '.join(bounded)} of term {s.name!r} can never act, because with one update per batch every "
        "importance ratio is 1; set train.minibatches or train.epochs to make several updates"
    ]
