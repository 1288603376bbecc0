"""Credit of group losses, LPO and PACS: minus the derivative of the loss in the log-prob of each response.

    s_k    log pi(y_k) - log mu(y_k) of the whole response now,   s_tk the same when the step's rows were scored
    lpo    w = softmax(R / tau + s_t), P = softmax(s):   forward KL(w || P)  A_k = w_k - P_k
                                reverse KL(P || w)  A_k = -P_k (d_k - sum P d),  d = s - R / tau - s_t
    pacs   a_k = beta (s_k - s_tk - mean of the others' s - s_t);   A = -d/ds of the cross-entropy of a and the labels,
           in which right and wrong answers weigh the same

mu is the policy that sampled. In the first update on rows of the present policy s and s_t are both 0; s_t is not where
the engine has other numerics or rows are older, and s differs from s_t in further updates of a step. Equal rewards give
no gradient where s = s_t. With several updates per batch s is read again before each of them, at the cost of a forward
pass over the rows (`recompute`); without it both count as 0. Sums over long responses grow large: when `lpo/effective`,
1 / sum P^2, is near 1, a single response has all the weight. The loss is -A sum_t log pi, so use ratio none and
aggregation constant. tau is a number, or the group's deviation (GRPO to first order) or mean (MaxRL). Sources: LPO,
arXiv 2605.06139 (text); PACS, the released code of 2509.02522, ritzz-ai/PACS.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeVar

from opd.wire.types import PayloadSpec
from opd_zoo.deviation import deviation
from student.data.needs import STUDENT, Needs, SignalNeed
from student.plugin.traits import Traits
from student.rl.advantages.base import Advantage, AdvantageSettings, Credit, known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.data.report import StepReport

_ROW = ("step", "uid", "sample", "turn", "agent")


class GroupLossSettings(AdvantageSettings):
    """Settings that LPO and PACS share."""

    recompute: bool = Field(
        True,
        description="Compute the log-ratios again before every further update on the rows of a step, at the cost "
        "of a forward pass over them.",
    )


GroupLossSettings_co = TypeVar(
    "GroupLossSettings_co", bound=GroupLossSettings, covariant=True, default=GroupLossSettings
)


class GroupLoss(Advantage[GroupLossSettings_co]):
    """Base of losses over a group: subclasses give `slopes`."""

    def __init__(self, settings: GroupLossSettings_co) -> None:
        super().__init__(settings)
        # s_t by row, as it was when the row was first seen in the step.
        self._before: dict[tuple[Any, ...], float] = {}

    @property
    def traits(self) -> Traits:
        again = self.settings.recompute
        return Traits(least_group=2, reads=("behaviour",) if again else (), recomputes=again, of_response=True)

    def needs(self) -> Needs:
        """The student's log-probs of the response tokens, if they are read again."""
        signals = (SignalNeed(STUDENT, PayloadSpec.sampled()),) if self.settings.recompute else ()
        return Needs(signals=signals)

    def estimate(self, outcomes: Sequence[Outcome], credit: Sequence[Credit] | None) -> list[Credit]:
        """One credit per row, by the module's formula."""
        found: list[Credit] = [0.0] * len(outcomes)
        self.fired = {}
        for places in self.groups(outcomes):
            rewards = [known(outcomes[place]) for place in places]
            gaps = [_log_ratio(outcomes[place]) if self.settings.recompute else 0.0 for place in places]
            before = [
                self._before.setdefault(outcomes[place].key(_ROW), gap) for place, gap in zip(places, gaps, strict=True)
            ]
            for place, value in zip(places, self.slopes(rewards, gaps, before), strict=True):
                found[place] = value
        return found

    def slopes(self, rewards: Sequence[float], gaps: Sequence[float], before: Sequence[float]) -> list[float]:
        """Minus the derivative of the loss in the log-prob of each response of a group.

        Args:
            rewards: one per response.
            gaps: s of each response, nats.
            before: s_t of each response, nats.
        """
        raise TypeError(f"{type(self).__name__} does not implement slopes")

    def observe(self, report: StepReport) -> None:
        """Forget the step's s_t."""
        self._before = {}


class LpoSettings(GroupLossSettings):
    """Settings of LPO."""

    tau: Annotated[float, Field(gt=0)] | Literal["std", "mean"] = Field(
        1.0,
        description="Temperature of the target distribution: a number, or the group's standard deviation (std) or "
        "mean (mean).",
    )
    divergence: Literal["forward_kl", "reverse_kl"] = Field(
        "forward_kl", description="Divergence by which the policy is fitted to the target."
    )


class Lpo(GroupLoss[LpoSettings]):
    """The weight of each response in a listwise target minus that in the policy (LPO)."""

    evidence = "text"

    @property
    def traits(self) -> Traits:
        tau = self.settings.tau
        shift, scale = tau != "mean", isinstance(tau, str)
        return replace(super().traits, shift_free="group" if shift else "", scale_free="group" if scale else "")

    def slopes(self, rewards: Sequence[float], gaps: Sequence[float], before: Sequence[float]) -> list[float]:
        """See `GroupLoss.slopes`; metric effective, the number of answers that P is spread over."""
        if len(rewards) < 2 or (len(set(rewards)) == 1 and list(gaps) == list(before)):
            return [0.0] * len(rewards)
        tau, present = self._tau(rewards), softmax(gaps)
        counted = self.fired.get("effective", (0.0, 0.0))
        # 1 / sum p^2: the number of answers that the weight is spread over.
        self.fired["effective"] = (counted[0] + 1.0 / math.fsum(p * p for p in present), counted[1] + 1.0)
        wanted = [reward / tau + old for reward, old in zip(rewards, before, strict=True)]
        if self.settings.divergence == "forward_kl":
            return [weight - p for weight, p in zip(softmax(wanted), present, strict=True)]
        away = [gap - value for gap, value in zip(gaps, wanted, strict=True)]
        # The gradient of KL(present || target): each distance minus their mean under the present weights.
        mean = math.fsum(p * d for p, d in zip(present, away, strict=True))
        return [-p * (d - mean) for p, d in zip(present, away, strict=True)]

    def _tau(self, rewards: Sequence[float]) -> float:
        tau = self.settings.tau
        if isinstance(tau, float):
            return tau
        found = deviation(rewards, 0) if tau == "std" else math.fsum(rewards) / len(rewards)
        return found if found > 0.0 else 1.0


class PacsSettings(GroupLossSettings):
    """Settings of PACS."""

    beta: float = Field(1.0, gt=0, description="Scale of the log-ratio.")
    threshold: float = Field(0.5, description="Minimum reward of an answer that counts as right.")


class Pacs(GroupLoss[PacsSettings]):
    """The derivative of a cross-entropy on right and wrong answers of the group (PACS)."""

    evidence = "text and code"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, shift_free="group", scale_free="group", sees_threshold=True)

    def slopes(self, rewards: Sequence[float], gaps: Sequence[float], before: Sequence[float]) -> list[float]:
        n, beta = len(rewards), self.settings.beta
        right = [reward >= self.settings.threshold for reward in rewards]
        moved = [gap - old for gap, old in zip(gaps, before, strict=True)]
        if n < 2 or (len(set(right)) == 1 and not any(moved)):
            return [0.0] * n
        sizes = {label: max(1, right.count(label)) for label in (True, False)}
        total = math.fsum(moved)
        # Each change of the log-ratio, relative to the mean of the others'.
        apart = [beta * (gap - (total - gap) / (n - 1)) for gap in moved]
        mixed = len(set(right)) > 1
        # Right answers together weigh as much as wrong ones together, whatever their numbers.
        slopes = [
            (n / (2 * sizes[label]) if mixed else 1.0) * (_sigmoid(a) - label) / n
            for a, label in zip(apart, right, strict=True)
        ]
        # Chain rule through `apart`: every answer is also in the mean that the others are compared with.
        total = math.fsum(slopes)
        return [-beta * (slope - (total - slope) / (n - 1)) for slope in slopes]


def _log_ratio(outcome: Outcome) -> float:
    """The log-ratio s of a response, nats; 0 where the student's log-probs were not read."""
    return outcome.sums.get(STUDENT, outcome.sums["behaviour"]) - outcome.sums["behaviour"]


def _sigmoid(value: float) -> float:
    # exp only of a negative number, which cannot overflow: sums over long responses reach hundreds of nats.
    power = math.exp(-abs(value))
    return 1.0 / (1.0 + power) if value >= 0 else power / (1.0 + power)


def softmax(values: Sequence[float]) -> list[float]:
    """Probabilities proportional to exp(values)."""
    best = max(values)  # subtracted, so that exp cannot overflow
    powers = [math.exp(value - best) for value in values]
    total = math.fsum(powers)
    return [power / total for power in powers]
