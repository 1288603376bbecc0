"""Dynamic sampling: replace groups whose rewards are all equal by groups of further prompts (DAPO, arXiv 2503.14476).

    kept  <- groups of the plan whose rewards differ
    while kept < groups of the plan and rounds are left:
        kept <- kept + groups of further prompts whose rewards differ
    learn from the first `groups of the plan` of kept

A group in which all rewards are equal has zero advantage everywhere and only dilutes the batch. Groups are chosen among
those of all ranks, in the order in which they were drawn, so the choice does not depend on how rows are spread over
ranks. Teachers score only the chosen groups, while further rounds are sampled. The selection favours prompts of medium
difficulty, so the gradient is that of a different mixture of prompts. Costs count everything that is sampled. The paper
draws without limit; here `rounds` is the limit, and a step that reaches it learns from fewer groups (metric
dynamic_sampling/filled).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from opd.errors import ConfigError
from student.data.needs import Needs
from student.data.row import RowKey
from student.plugin.strategy import Strategy, StrategySettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from student.data.outcome import Outcome
    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe


class DynamicSamplingSettings(StrategySettings):
    """Settings of dynamic sampling."""

    rounds: int = Field(4, ge=2, description="Maximum number of rounds in a step, including the planned one.")
    draw: Literal["batch", "missing"] = Field(
        "batch",
        description="Number of prompts in a further round. batch: as many as the step has (as the released code "
        "does). missing: as many as there are groups missing, which samples less but takes more rounds.",
    )


class DynamicSampling(Strategy[DynamicSamplingSettings]):
    """Draws further prompts until enough groups have rewards that differ (DAPO)."""

    evidence: ClassVar[str] = "text and code"
    why_not_stale = ""
    judges = True

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse groups of one answer."""
        check_groups(self, recipe)

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """See `drops_what_is_learnt`."""
        return drops_what_is_learnt(self, recipe)

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`."""
        want = sum(sampling.gather(len({row.key.group for row in plan.rows})))
        pool: list[Row] = []
        kept: dict[str, None] = {}
        drawn = 0
        for left in reversed(range(self.settings.rounds)):
            rows = sampling.judge(plan.rows)
            pool += rows
            groups = rewards_of(sampling.outcomes(rows), sampling.drawn)
            drawn += len(groups)
            kept |= {group: None for group, rewards in groups.items() if len(rewards) > 1}
            sure = set(list(kept)[:want])
            # Teachers can start on these groups, because later rounds only append to them.
            sampling.keep([row for row in rows if row.key.group in sure])
            missing = want - len(kept)
            if missing <= 0 or not left:
                break
            plan = sampling.more(missing if self.settings.draw == "missing" else want)
        chosen = set(list(kept)[:want])
        # All ranks have the same numbers, so counting them on each rank does not change the ratio.
        sampling.measure("dynamic_sampling/kept_share", len(kept), drawn)
        sampling.measure("dynamic_sampling/filled", len(chosen), want)
        return [row for row in pool if row.key.group in chosen]


def check_groups(strategy: Strategy, recipe: Recipe) -> None:
    """Refuse groups of one answer, in which rewards cannot differ.

    Raises:
        ConfigError: naming the setting to raise.
    """
    if recipe.rollout.samples_per_prompt < 2:
        raise ConfigError(
            f"rollout.strategy {strategy.settings.name} compares the answers to a prompt, but "
            f"rollout.samples_per_prompt is {recipe.rollout.samples_per_prompt}; set it to 2 or more, for example 8."
        )


def drops_what_is_learnt(strategy: Strategy, recipe: Recipe) -> list[str]:
    """A warning if the strategy drops groups from which an advantage of the recipe would learn."""
    from student.plugin.terms import build_terms

    chains = [term.chain for term in build_terms(recipe.objective) if hasattr(term, "chain")]
    return [
        f"rollout.strategy {strategy.settings.name} drops the groups whose rewards are all equal, although advantage "
        f"{chain.first.settings.name!r} learns from them"
        for chain in chains
        if chain.traits.learns_from_equal
    ]


def group_of(outcome: Outcome) -> str:
    """The key of the group of a row; see `RowKey`."""
    return RowKey(outcome.step, outcome.uid, outcome.sample, outcome.turn, outcome.agent).group


def rewards_of(outcomes: Iterable[Outcome], drawn: Sequence[str]) -> dict[str, set[float]]:
    """The distinct known rewards of each group, in the order of `drawn`; outcomes are sorted by uid instead."""
    groups: dict[str, set[float]] = {}
    for outcome in outcomes:
        groups.setdefault(group_of(outcome), set()).update([] if outcome.reward is None else [outcome.reward])
    return {group: groups[group] for group in drawn if group in groups}
