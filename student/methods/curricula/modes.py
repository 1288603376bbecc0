"""Give more rows to the modes in which the student is still far from the mode's teacher.

    lag_k   = clip((v_k - target_k) / (v_k at first - target_k), 0, 1)     1: as far as at the start, 0: recovered
    share_k = weight_k (floor + lag_k) / sum_j weight_j (floor + lag_j)

v_k is smoothed over steps. By `divergence` it is the sampled reverse KL of rows in mode k, nats per token, with target
0; by `accuracy` the verdict of rows that ended within the budget, with the teacher's accuracy
(`modes.NAME.teacher_accuracy`) as target. A step's prompts get modes by systematic sampling, so every mode's expected
share is exact in every step and rounding favours none. Ours; ORBIT (arXiv 2601.08310) samples modes uniformly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.tasks.modes import ModeSettings
from opd.wire.types import PayloadKind
from student.data.needs import TEACHER, Needs
from student.data.row import RowKey
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.outcome import Outcome
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class ModesSettings(ControllerSettings):
    """Settings of the shares."""

    by: Literal["divergence", "accuracy"] = Field(
        "divergence",
        description="What measures how far a mode lags behind its teacher: the reverse KL in nats per token, or the "
        "accuracy.",
    )
    floor: float = Field(
        0.1, gt=0, description="Constant added to every mode's lag, so that no mode loses all its rows."
    )
    smoothing: float = Field(
        0.9, ge=0, lt=1, description="Share of the smoothed divergence or accuracy that each step keeps."
    )


class Modes(Controller[ModesSettings]):
    """Gives more rows to the modes that lag behind their teachers (ORBIT).

    The smoothed value of each mode and its first one are its state.
    """

    traits = Traits(works_ahead=True)

    def __init__(self, settings: ModesSettings) -> None:
        super().__init__(settings)
        self._modes: dict[str, ModeSettings] = {}
        self._longest = 0
        self._seed = 0
        self._first: dict[str, float] = {}
        self._now: dict[str, float] = {}

    def needs(self) -> Needs:
        """Verdicts, if lags are measured by accuracy."""
        return Needs(reward="verdict") if self.settings.by == "accuracy" else Needs()

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Read modes, seed and the length limit from the recipe.

        Raises:
            ConfigError: without modes, or if lags cannot be measured.
        """
        modes = {name: mode for name, mode in recipe.modes.items() if mode.weight}
        if len(modes) < 2:
            raise ConfigError(
                "method modes shares rows among modes, but the recipe has fewer than two with a weight; add some to "
                "modes."
            )
        kinds = {need.spec.kind for term in terms for need in term.needs().signals if need.role == TEACHER}
        if self.settings.by == "divergence" and not kinds - {PayloadKind.HIDDEN}:
            raise ConfigError(
                "method modes with by: divergence needs the teacher's log-probs of sampled tokens, which no term asks "
                "for; use payload gather, topk or sampled, or by: accuracy."
            )
        unknown = [name for name, mode in modes.items() if mode.teacher_accuracy is None]
        if self.settings.by == "accuracy" and unknown:
            raise ConfigError(
                f"method modes needs the accuracy of the teacher of mode {', '.join(unknown)}; set "
                f"modes.{unknown[0]}.teacher_accuracy, or use by: divergence."
            )
        self._modes, self._seed, self._longest = modes, recipe.seed, recipe.rollout.max_new_tokens

    def lags(self) -> dict[str, float]:
        """How far each mode still is from its teacher, in [0, 1]; 1 if nothing is known yet."""
        found = {}
        for name, mode in self._modes.items():
            target = 0.0 if self.settings.by == "divergence" else (mode.teacher_accuracy or 0.0)
            if name not in self._now:
                found[name] = 1.0
                continue
            sign = 1.0 if self.settings.by == "divergence" else -1.0
            left, whole = sign * (self._now[name] - target), sign * (self._first[name] - target)
            # The lag of a mode that began at or beyond its target is what it has lost since.
            found[name] = float(np.clip(left / whole if whole > 0 else left, 0.0, 1.0))
        return found

    def shares(self) -> dict[str, float]:
        """Expected share of each mode in the rows of the next step."""
        raw = {n: self._modes[n].weight * (self.settings.floor + lag) for n, lag in self.lags().items()}
        total = sum(raw.values())
        return {name: value / total for name, value in raw.items()}

    def plan(self, plan: StepPlan) -> StepPlan:
        """Assign modes to the step's prompts by their shares."""
        groups: dict[str, list[PlannedRow]] = {}
        for row in plan.rows:
            groups.setdefault(row.key.group, []).append(row)
        if not groups:
            return plan
        names, shares = list(self._modes), list(self.shares().values())
        # Systematic sampling: equally spaced points with one random offset over the cumulative shares. Every mode gets
        # its share of the groups, rounded up or down, and exactly its share in expectation.
        offset = stream(self._seed, "modes", plan.step, next(iter(groups))).random()
        points = (np.arange(len(groups)) + offset) / len(groups)
        chosen = np.minimum(np.searchsorted(np.cumsum(shares), points, side="right"), len(names) - 1)
        # Permuted, because the points are sorted by mode while ranks take groups by their position.
        order = stream(self._seed, "modes", "order", plan.step, next(iter(groups))).permutation(len(groups))
        taken: dict[str, int] = {}
        rows: list[PlannedRow] = []
        for group, place in zip(groups.values(), order, strict=True):
            rows += self._asked(group, names[int(chosen[place])], taken)
        return replace(plan, rows=tuple(rows))

    def _asked(self, group: Sequence[PlannedRow], name: str, taken: dict[str, int]) -> list[PlannedRow]:
        """The rows of a prompt in mode `name`; if a prompt occurs twice, its rows get distinct sample indices."""
        mode = self._modes[name]
        prompt = mode.mark(group[0].prompt, name)
        first = taken.get(prompt.uid, 0)
        taken[prompt.uid] = first + len(group)
        longest = min(self._longest, mode.budget)
        return [
            replace(row, key=RowKey(row.key.step, prompt.uid, first + i), prompt=prompt, max_new_tokens=longest)
            for i, row in enumerate(group)
        ]

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics mode/share/NAME of the step's rows, and mode/lag/NAME from which the shares were computed."""
        domains = [outcome.domain for outcome in services.outcomes if outcome.domain in self._modes]
        metrics = {f"mode/lag/{name}": lag for name, lag in self.lags().items()}
        if domains:
            metrics |= {f"mode/share/{name}": domains.count(name) / len(domains) for name in self._modes}
        return metrics

    def observe(self, report: StepReport) -> None:
        """Update the smoothed value of each mode that had rows in the step."""
        past = self.settings.smoothing
        for name in self._modes:
            value = self._value([o for o in report.outcomes if o.domain == name and o.on_policy])
            if value is not None:
                self._first.setdefault(name, value)
                self._now[name] = past * self._now.get(name, value) + (1 - past) * value

    def _value(self, outcomes: Sequence[Outcome]) -> float | None:
        """Divergence per token, or accuracy, of the rows in a mode; None if nothing is known."""
        if self.settings.by == "accuracy":
            known = [0.0 if o.truncated else o.reward for o in outcomes if o.truncated or o.reward is not None]
            return float(np.mean(np.array(known, dtype=np.float64))) if known else None
        scored = [o for o in outcomes if TEACHER in o.sums]
        tokens = sum(o.tokens for o in scored)
        return sum(o.sums["behaviour"] - o.sums[TEACHER] for o in scored) / tokens if tokens else None

    def state_dict(self) -> dict[str, Any]:
        """The smoothed values and the first values."""
        return {"first": dict(self._first), "now": dict(self._now)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._first = {name: float(value) for name, value in state["first"].items()}
        self._now = {name: float(value) for name, value in state["now"].items()}
