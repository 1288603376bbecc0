"""Replay: groups of earlier steps join the new ones, drawn by the size of their advantages and by their age.

    learnt from = the groups of the plan, and `share` times as many kept ones
    drawn in proportion to max(|A|, floor)^power clip(freshness, 0.1, 1),   |A| the mean |r - mean r| of the group
    freshness of a kept group: 1 when it enters, times `fade` for every later step

Only groups whose rewards differ are kept, the newest `capacity` of them, the same on every rank. Replayed rows have
origin replay and the log-probs of the policy that sampled them, so use a loss that is made for old rows (topr, cispo,
rec, or a clip) with `rows: all`. They keep their rewards, but models score them again. Source: the rule is DR.Q's
(released code, dmksjfl/DR.Q, which replays single transitions of robots: priority max(|delta|, 1)^0.4, fade 0.9999 per
insert); applying it to |A| of groups, and the floor, are ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from typing_extensions import TypeVar

from opd.errors import ConfigError
from student.data.needs import Needs
from student.data.outcome import reward_of
from student.data.states import row_from_state, row_to_state
from student.data.streams import stream
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits
from student.scoring.contexts import reads_outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe

_LEAST_FRESH = 0.1


class ReplaySettings(StrategySettings):
    """Settings that replaying strategies share."""

    capacity: int = Field(
        256, ge=1, description="Maximum number of groups that are kept; the oldest make way for new ones."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of groups to replay.")


ReplaySettings_co = TypeVar("ReplaySettings_co", bound=ReplaySettings, covariant=True, default=ReplaySettings)


class Replaying(Strategy[ReplaySettings_co]):
    """Base class of strategies that keep groups; subclasses implement `kept_of` and `drawn`.

    Attributes:
        groups: kept groups, the oldest first, each a list of rows.
    """

    traits = Traits(
        least_group=2,
        gives_rows=("all",),
        gives_log_probs=True,
        gives_stale_rows=True,
        why={"gives_rows": "set rows: all in a term"},
    )

    def __init__(self, settings: ReplaySettings_co) -> None:
        super().__init__(settings)
        self.groups: list[list[Row]] = []
        # The groups of the step in progress, which are added once it has updated. They are saved, so that a run resumed
        # after the update keeps them; a step that is taken again replaces them.
        self._new: list[list[Row]] = []
        self._drawn: list[int] = []

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse terms that skip replayed rows, or cannot learn from rows of older weights.

        Raises:
            ConfigError: naming what to change.
        """
        name = self.settings.name
        for term in terms:
            if term.settings.rows == "expert":
                raise ConfigError(
                    f"term {term.settings.name!r} has rows: expert and would treat what rollout.strategy {name} "
                    "replays as given answers; remove one of the two."
                )
        # A replayed row keeps its reward but not its verdict, which such a context may quote.
        late = [role for role, context in recipe.contexts.items() if reads_outcomes(role, context)]
        if late:
            raise ConfigError(
                f"contexts.{late[0]} is made from the outcomes of a row's group, which rollout.strategy {name} does "
                "not keep; remove one of the two."
            )

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        rows = sampling.score(sampling.sample(plan.rows))
        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.key.group, []).append(row)
        found = sampling.gather([self.kept_of(group) for group in groups.values()])
        new = [group for part in found for group in part if group]
        order = {group: place for place, group in enumerate(sampling.drawn)}
        self._new = sorted(new, key=lambda group: order[group[0].key.group])
        self._drawn = self.drawn(plan.step, sum(sampling.gather(len(groups))))
        count, index = sampling.ranks
        # All ranks draw the same groups, and each replays its share of them.
        old = [row for place in self._drawn[index::count] for row in self.groups[place]]
        sampling.measure("replayed_share", len(old), len(old) + len(rows))
        # Copies, because models score them again, and a step that is taken again needs the rows as they were kept.
        return rows + sampling.rescore([row_from_state(row_to_state(row)) for row in old])

    def kept_of(self, group: Sequence[Row]) -> list[Row]:
        """The rows of a new group to keep, in the form in which to replay them; empty to keep none."""
        raise TypeError(f"{type(self).__name__} does not implement kept_of")

    def drawn(self, step: int, groups: int) -> list[int]:
        """Indices of the kept groups to replay with `groups` new ones."""
        raise TypeError(f"{type(self).__name__} does not implement drawn")

    def observe(self, report: StepReport) -> None:
        """Keep the groups of the step."""
        self.groups = (self.groups + self._new)[-self.settings.capacity :]
        self._new = []

    def state_dict(self) -> dict[str, Any]:
        """The kept groups."""
        return {
            "groups": [[row_to_state(row) for row in group] for group in self.groups],
            "new": [[row_to_state(row) for row in group] for group in self._new],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.groups = [[row_from_state(row) for row in group] for group in state["groups"]]
        self._new = [[row_from_state(row) for row in group] for group in state["new"]]


class PrioritisedSettings(ReplaySettings):
    """Settings of the replay."""

    share: float = Field(0.25, gt=0, description="Number of replayed groups, in multiples of the step's new ones.")
    power: float = Field(
        0.4,
        ge=0,
        description="Exponent of |A| in a group's priority: 0 ignores it, larger values prefer groups with larger "
        "advantages.",
    )
    floor: float = Field(0.05, gt=0, description="Lower bound on the |A| that enters a group's priority.")
    fade: float = Field(
        0.99, gt=0, le=1, description="Factor by which the freshness of a kept group shrinks with every step."
    )


class Replay(Replaying[PrioritisedSettings]):
    """Learns from groups of earlier steps along with the new ones."""

    evidence: ClassVar[str] = "inferred"
    traits = replace(Replaying.traits, works_ahead=True)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a share so small that no group is ever replayed.

        Raises:
            ConfigError: naming the setting to raise.
        """
        super().check(recipe, terms)
        groups = recipe.rollout.prompts_per_step
        if not round(self.settings.share * groups):
            raise ConfigError(
                f"rollout.strategy replay with share {self.settings.share:g} of the {groups} groups of a step replays "
                "none; raise share or rollout.prompts_per_step."
            )

    def kept_of(self, group: Sequence[Row]) -> list[Row]:
        """The whole group if its rewards differ."""
        return [as_replayed(row) for row in group] if len(set(map(reward_of, group)) - {None}) > 1 else []

    def drawn(self, step: int, groups: int) -> list[int]:
        """Draw groups in proportion to their priority, without replacement."""
        count = min(round(self.settings.share * groups), len(self.groups))
        if not count:
            return []
        weights = [self._priority(group, step) for group in self.groups]
        total = sum(weights)
        rng = stream(self.settings.seed, "replay", step)
        places = rng.choice(len(weights), size=count, replace=False, p=[weight / total for weight in weights])
        return sorted(int(place) for place in places)

    def _priority(self, group: Sequence[Row], step: int) -> float:
        s = self.settings
        rewards = [row.reward for row in group if row.reward is not None]
        mean = sum(rewards) / len(rewards)
        size = sum(abs(reward - mean) for reward in rewards) / len(rewards)
        fresh = s.fade ** (step - 1 - group[0].key.step)
        return float(max(size, s.floor) ** s.power * min(max(fresh, _LEAST_FRESH), 1.0))


def as_replayed(row: Row, *, trained: bool | None = None) -> Row:
    """A copy of a row for replay, which keeps only what was sampled and its reward."""
    copy = row_from_state(row_to_state(row))
    copy.origin, copy.reward, copy.rewarded, copy.reward_parts = "replay", reward_of(row), True, {}
    copy.trained = row.trained if trained is None else trained
    return copy
