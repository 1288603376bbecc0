"""Base class of rewards: they look at rows that have their signals and verdicts, in whole groups, and reward them.

    reward of a row = the whole (a plug-in's, or else the verdict's value) + the sum of its parts

A reward of kind "whole" sets `row.reward` and replaces the verdict; there is at most one. A reward of kind "part" adds
to `row.reward_parts` under its name. Rewards may leave [0, 1], be given by turn (`row.turn_rewards`) or by token
(`row.token_rewards`), and take rows out of the statistics (`row.reward = None`) or out of the loss alone
(`row.trained = False`). What is unknown is None or left out, never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from typing_extensions import TypeVar

from opd.config import Settings
from opd.errors import ConfigError, PluginError
from student.data.needs import Needs
from student.plugin.base import Plugin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.wire.types import PayloadSpec, ScoreItem, Scores
    from student.data.row import Row
    from student.plugin.terms import Term


class RewardSettings(Settings):
    """Settings that every reward has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


class RewardServices(Protocol):
    """What a reward may ask of the training loop."""

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer."""

    def read(
        self,
        items: Sequence[Row | ScoreItem],
        spec: PayloadSpec | None = None,
        *,
        model: str = "student",
        temperature: float | None = None,
    ) -> list[Scores]:
        """Scores of responses under the student's present weights, or a copy; see `Services.read`.

        With sharded weights every rank must call this equally often, even when it has nothing to read.
        """

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form that equal answers share; None where it has none."""


RewardSettings_co = TypeVar("RewardSettings_co", bound=RewardSettings, covariant=True, default=RewardSettings)


class Reward(Plugin[RewardSettings_co]):
    """A reward.

    Attributes:
        kind: "whole" if it gives the whole reward, "part" if it adds to it.
        by_group: whether the reward of a row depends on the other rows of its group. All of them are then rewarded
            again when a later round of a rollout strategy adds to the group.
        fired: what it did since this was last cleared, as metrics (sum, count).
    """

    kind: ClassVar[Literal["whole", "part"]] = "part"
    by_group: ClassVar[bool] = True

    def __init__(self, settings: RewardSettings_co) -> None:
        super().__init__(settings)
        self.fired: dict[str, tuple[float, float]] = {}

    def needs(self) -> Needs:
        """What it needs; by default verdicts."""
        return Needs(reward="verdict")

    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value that it gives with these settings; None if they are not known."""
        return None

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Reward `rows`, which hold whole groups: this rank's, or those of a round and, if groups grew, all before.

        Must not change what `state_dict` saves: a step that was interrupted is repeated after a resume.
        """
        raise PluginError(f"{type(self).__name__} does not implement reward.")

    def close(self) -> None:
        """Release worker processes."""

    def fire(self, metric: str, total: float, count: float = 1.0) -> None:
        """Add `total` and `count` to one of its metrics."""
        old = self.fired.get(metric, (0.0, 0.0))
        self.fired[metric] = (old[0] + total, old[1] + count)


def in_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows grouped by the prompt that they answer."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.key.group, []).append(row)
    return list(found.values())


def is_correct(row: Row) -> bool | None:
    """Whether the verifier found the answer correct; None if it could not tell."""
    value = row.verdict_value
    return None if value is None else value >= 1.0


def check_scale(what: str, terms: Sequence[Term]) -> None:
    """Refuse a factor on all rewards where every advantage divides by their deviation.

    Args:
        what: the factor and its reward, for the message.
        terms: those of the objective.

    Raises:
        ConfigError: naming the factor and an advantage.
    """
    chains = [chain for term in terms if (chain := getattr(term, "chain", None)) is not None]
    if chains and all(chain.scale_free for chain in chains):
        raise ConfigError(
            f"{what} multiplies every reward, but advantage {chains[0].first.settings.name!r} divides by their "
            "deviation, so it would change nothing; remove it."
        )
