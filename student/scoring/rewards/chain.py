"""The rewards of a recipe, applied in order to scored rows."""

from __future__ import annotations

import copy
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import ConfigError, PluginError, short
from student.state.named_states import load_states, states_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from student.data.report import StepReport
    from student.data.row import Row
    from student.scoring.rewards.base import Reward, RewardServices

_FIRED = "fired/"


class RewardChain:
    """Applies rewards one after the other to scored rows.

    Args:
        rewards: at most one of them of kind "whole".

    Raises:
        ConfigError: for two rewards that both give the whole, two with one name, or an unknown kind.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.parts = list(rewards)
        for reward in self.parts:
            if reward.kind not in ("whole", "part"):
                raise ConfigError(
                    f"reward {reward.label} is of kind {reward.kind!r}; its kind must be 'whole' or 'part'."
                )
        wholes = [reward.label for reward in self.parts if reward.kind == "whole"]
        if len(wholes) > 1:
            raise ConfigError(f"rewards {' and '.join(wholes)} each give the whole reward of a row; keep one of them.")
        self.whole = wholes[0] if wholes else None
        names = [reward.label for reward in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"reward {name!r} is named twice; keep one of them.")

    @property
    def by_group(self) -> bool:
        """Whether any reward compares the answers of a group."""
        return any(reward.by_group for reward in self.parts)

    @property
    def reads_signals(self) -> bool:
        """Whether any reward reads the scores of models."""
        return any(reward.needs().signals for reward in self.parts)

    def apply(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Reward scored rows.

        Raises:
            PluginError: if a reward returns something, or sets rewards of a wrong shape or that are not finite.
        """
        for row in rows:
            # With a whole reward, an unset `row.reward` means unknown from here on, instead of the verdict's value.
            row.rewarded = self.whole is not None
        for reward in self.parts:
            returned = reward.reward(rows, services)  # type: ignore[func-returns-value]
            if returned is not None:  # a returned value would be ignored
                raise PluginError(
                    f"reward {reward.settings.name!r} returned {short(returned)}; it must return nothing, and set "
                    "row.reward or row.reward_parts[self.label] of each row."
                )
            for row in rows:
                _check(reward, row)

    def aside(self) -> RewardChain:
        """The same rewards with separate counts, for rows outside the step, possibly in another thread."""
        parts = [copy.copy(reward) for reward in self.parts]
        for part in parts:
            part.fired = {}
        return RewardChain(parts)

    def counted(self) -> list[dict[str, tuple[float, float]]]:
        """What the rewards have counted since `take`, for `recount`."""
        return [dict(reward.fired) for reward in self.parts]

    def recount(self, counted: Sequence[Mapping[str, tuple[float, float]]]) -> None:
        """Reset the counts to those that `counted` returned."""
        for reward, fired in zip(self.parts, counted, strict=True):
            reward.fired = dict(fired)

    def take(self) -> dict[str, float]:
        """What the rewards counted since the last call, as sums that can be added over ranks; resets the counts."""
        found = {}
        for reward in self.parts:
            for metric, (total, count) in reward.fired.items():
                found[f"{_FIRED}{reward.label}/{metric}/sum"] = total
                found[f"{_FIRED}{reward.label}/{metric}/count"] = count
            reward.fired = {}
        return found

    def observe(self, report: StepReport) -> None:
        """Let each reward learn from the finished step."""
        for reward in self.parts:
            reward.observe(report)

    def close(self) -> None:
        """Release the resources of the rewards."""
        for reward in self.parts:
            reward.close()

    def state_dict(self) -> dict[str, Any]:
        """State of every reward, by its name."""
        return states_of(self.parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        load_states(self.parts, state, "rewards")


def fired_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics REWARD/METRIC from the sums of `RewardChain.take`, of one rank or added over all ranks."""
    found = {}
    for name, count in counts.items():
        if name.startswith(_FIRED) and name.endswith("/count") and count:
            stem = name.removesuffix("/count")
            found[stem.removeprefix(_FIRED)] = counts[f"{stem}/sum"] / count
    return found


def _check(reward: Reward, row: Row) -> None:
    whole = 0.0 if row.reward is None else row.reward
    for what, value in (("reward", whole), ("part of the reward", row.reward_parts.get(reward.label, 0.0))):
        if not isinstance(value, Real | np.bool_) or not np.isfinite(value):
            raise PluginError(
                f"reward {reward.settings.name!r} set the {what} of sample {row.key.sample} of prompt {row.key.uid} "
                f"to {short(value)}; it must be a finite number, or stay unset where it is unknown."
            )
    if row.turn_rewards and len(row.turn_rewards) != len(row.turns):
        raise PluginError(
            f"reward {reward.settings.name!r} set {len(row.turn_rewards)} rewards for {len(row.turns)} turns; it must "
            "set one for each."
        )
    if not isinstance(row.token_rewards, np.ndarray | None):
        raise PluginError(
            f"reward {reward.settings.name!r} set token_rewards to {short(row.token_rewards)}; it must be a numpy "
            "array with one number for each token."
        )
    if row.token_rewards is not None and row.token_rewards.shape != (row.length,):
        raise PluginError(
            f"reward {reward.settings.name!r} set rewards of shape {row.token_rewards.shape} for a response of "
            f"{row.length} tokens; it must set one for each."
        )
    finer = [("turn", row.turn_rewards or ()), ("token", () if row.token_rewards is None else row.token_rewards)]
    for what, values in finer:
        # Checked here, where the reward can be named: later it would be blamed on the advantage.
        if not np.isfinite(np.asarray(values, np.float64)).all():
            raise PluginError(
                f"reward {reward.settings.name!r} set a reward that is not finite for a {what} of sample "
                f"{row.key.sample} of prompt {row.key.uid}; it must be 0 where there is no reward."
            )
