"""What an advantage says of its formula, so that recipes in which it could not work are refused before they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from opd.errors import PluginError, short

Scope: TypeAlias = Literal["", "batch", "group"]
"""Rewards that can be shifted or scaled together without effect: the whole step's, or those of any one group."""

Source: TypeAlias = Literal["values", "behaviour", "turns", "token_rewards"]
"""What credit may be made of besides rewards: a critic's values, the log-probs of the policy that sampled (which given
answers lack), rewards by turn, or rewards by token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The traits of an advantage under its settings; the defaults claim nothing.

    Attributes:
        least_group: rows that a group needs to get any credit other than 0.
        learns_from_equal: whether groups whose rewards all agree get credit.
        shift_free: over which binary rewards adding a constant changes nothing, so that a reward that is constant there
            has no effect; "" for none.
        scale_free: the same for multiplying by a positive factor, up to an epsilon.
        sees_threshold: whether `shift_free` and `scale_free` hold only while every reward stays on its side of a
            threshold. Moving the rewards of a group across it does have an effect.
        within: the least and the largest reward that it accepts; None for any.
        reads: what credit is made of besides rewards.
        recomputes: whether credit depends on the present policy. It is then recomputed before every update of a step
            but the first, group by group, with the student's log-probs at that time.
        off_policy: whether it is made for rows of an older policy without a ratio.
        of_response: whether it is minus the derivative of a loss in the log-prob of a whole response. With ratio none
            and aggregation constant the gradient is then that of this loss.
    """

    least_group: int = 1
    learns_from_equal: bool = False
    shift_free: Scope = ""
    scale_free: Scope = ""
    sees_threshold: bool = False
    within: tuple[float, float] | None = None
    reads: tuple[Source, ...] = ()
    recomputes: bool = False
    off_policy: bool = False
    of_response: bool = False


def traits_of(part: object, found: object) -> Traits:
    """What the `traits` of an advantage returned.

    Raises:
        PluginError: if that is anything but `Traits`.
    """
    if not isinstance(found, Traits):
        raise PluginError(
            f"{type(part).__name__}.traits returned {short(found)}; it must return a "
            "student.rl.advantages.traits.Traits."
        )
    return found
