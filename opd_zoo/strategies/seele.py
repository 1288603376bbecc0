"""SEELE: answers are sampled in rounds, after as much of the solution as makes about half of them right.

    a(p)    c + (1 - c) / (1 + exp(-k (p - b))),   the share of right answers after the share p of the solution
    p_1     `first`, or what the prompt's last step would have had next
    p_r+1   where a(p) = target, clipped to [0, 1], k, b, c fitted to (p, share right) of the prompt's rounds so far

An update learns most where half of the answers are right. The hint is a beginning of the kept column `solution`, by
characters, put behind the prompt; answers are sampled and trained under the prompt with it. k, b and c minimise the
squared error, weighted by answers, plus `prior` times the squared distance from k 6, b where the round before stood,
and c 0 (k in logs). All answers of a prompt form one group. Source: arXiv 2509.06923 (text at second hand: target,
three-parameter logistic, rounds; number of rounds, fit and prior are ours, and its supervised loss on hints is a term
sft beside method expert_rows).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from opd.errors import ConfigError, DataError
from opd_zoo.prompts import in_template
from opd_zoo.strategies.hinted import rewards_by_row
from student.data.needs import Needs
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.rollout.sampling import Sampling
    from student.settings.recipe import Recipe

_RATE = "seele/rate"
_SLOPES = np.geomspace(1.5, 60.0, 12)
_PLACES = np.linspace(-1.0, 2.0, 61)
_GUESSES = np.array([0.0, 0.1, 0.2, 0.3])
Rounds = list[tuple[float, float, int]]
"""(share of the solution, share of right answers, answers) of each round of a prompt."""


class SeeleSettings(StrategySettings):
    """Settings of SEELE."""

    column: str = Field("solution", description="Kept column with the whole solution (prompts.keep_columns).")
    text: str = Field(
        "{prompt}\n{hint}", description="How the prompt and the beginning of the solution are put together."
    )
    rounds: int = Field(4, ge=2, description="Number of rounds into which the answers of a prompt are divided.")
    first: float = Field(0.5, ge=0, le=1, description="Share of the solution that a prompt's first round is shown.")
    target: float = Field(0.5, gt=0.35, lt=1, description="Share of right answers that is aimed at.")
    threshold: float = Field(1.0, description="Minimum reward of an answer that counts as right.")
    prior: float = Field(0.01, gt=0, description="Weight of the prior in the fit, per answer of a squared error of 1.")


class Seele(Strategy[SeeleSettings]):
    """Shows as much of the solution as makes about half of the answers right (SEELE).

    Its state is the share that each prompt would be shown next.
    """

    evidence: ClassVar[str] = "text"

    @property
    def traits(self) -> Traits:
        return Traits(
            judges_first=True,
            least_group=2,
            columns=(self.settings.column,),
            why={
                "works_ahead": "it decides what a round is shown by the rewards of the round before",
                "least_group": "divides the answers of a group into rounds",
            },
        )

    def __init__(self, settings: SeeleSettings) -> None:
        super().__init__(settings)
        self.next: dict[str, float] = {}

    def needs(self) -> Needs:
        """Rewards."""
        return Needs(reward="any")

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse more rounds than answers.

        Raises:
            ConfigError: with the settings to change.
        """
        samples = recipe.rollout.samples_per_prompt
        if self.settings.rounds > samples:
            raise ConfigError(
                f"rollout.strategy seele divides {samples} answers to a prompt into {self.settings.rounds} rounds; "
                "lower rounds, or raise rollout.samples_per_prompt."
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts without a solution.

        Raises:
            DataError: naming the first of them.
        """
        for prompt in prompts:
            self._solution(prompt)

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """See `Strategy.run`; metrics seele/rate (of the solution), seele/off_target and seele/too_long_share."""
        groups: dict[str, list[PlannedRow]] = {}
        for one in plan.rows:
            groups.setdefault(one.key.uid, []).append(one)
        rates = {uid: self.next.get(uid, self.settings.first) for uid in groups}
        done: dict[str, Rounds] = {uid: [] for uid in groups}
        found: list[Row] = []
        for number in range(self.settings.rounds):
            planned = []
            for uid, mine in groups.items():
                part = mine[number :: self.settings.rounds]
                planned += [self._shown(one, rates[uid], sampling) for one in part]
            rows = sampling.judge(planned)
            rewards = rewards_by_row(rows, sampling)
            for uid in groups:
                answered = [row for row in rows if row.key.uid == uid]
                for row in answered:
                    row.notes[_RATE] = rates[uid]
                right = self._right([rewards[uid, row.key.sample] for row in answered])
                if right is None:
                    continue
                sampling.measure("seele/rate", rates[uid])
                sampling.measure("seele/off_target", abs(right[0] - self.settings.target))
                done[uid].append((rates[uid], *right))
                rates[uid] = self.rate(done[uid])
            found += rows
        order = {one.key: place for place, one in enumerate(plan.rows)}
        return sorted(found, key=lambda row: order[row.key])

    def _right(self, rewards: Sequence[float | None]) -> tuple[float, int] | None:
        known = [reward for reward in rewards if reward is not None]
        return (sum(r >= self.settings.threshold for r in known) / len(known), len(known)) if known else None

    def _shown(self, one: PlannedRow, rate: float, sampling: Sampling) -> PlannedRow:
        """The row under the prompt with a beginning of its solution; without one if that does not fit."""
        solution = self._solution(one.prompt)
        hint = solution[: round(rate * len(solution))]
        shown = in_template(one.prompt, self.settings.text, {"hint": hint}) if hint else one.prompt
        fits = not hint or sampling.fits(shown)
        sampling.measure("seele/too_long_share", float(not fits))
        return replace(one, prompt=shown) if fits else one

    def _solution(self, prompt: Prompt) -> str:
        found = prompt.extra.get(self.settings.column)
        if not found:
            raise DataError(
                f"{prompt.name} has no column {self.settings.column!r}, from which rollout.strategy seele reads the "
                "solution; add it to prompts.keep_columns."
            )
        return str(found)

    def rate(self, rounds: Rounds) -> float:
        """The share of the solution to show next, by the rounds of a prompt so far."""
        k, b, c = fitted(rounds, self.settings.prior)
        odds = (1.0 - c) / (self.settings.target - c) - 1.0
        return min(max(b - math.log(odds) / k, 0.0), 1.0)

    def observe(self, report: StepReport) -> None:
        """Remember what each prompt of the step would be shown next."""
        shown: dict[str, dict[float, list[float | None]]] = {}
        for outcome in report.outcomes:
            if _RATE in outcome.notes:
                shown.setdefault(outcome.uid, {}).setdefault(outcome.notes[_RATE], []).append(outcome.reward)
        for uid, by_rate in shown.items():
            rounds = [(rate, *right) for rate, rewards in by_rate.items() if (right := self._right(rewards))]
            if rounds:
                self.next[uid] = self.rate(rounds)

    def state_dict(self) -> dict[str, Any]:
        """The share that each prompt would be shown next."""
        return {"next": dict(self.next)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.next = {str(uid): float(rate) for uid, rate in state["next"].items()}


def fitted(rounds: Rounds, prior: float) -> tuple[float, float, float]:
    """(k, b, c) of the module's formula, on a grid, for rounds of which there is at least one."""
    slopes, places, guesses = np.meshgrid(_SLOPES, _PLACES, _GUESSES, indexing="ij")
    last = rounds[-1][0]
    loss = prior * (np.log(slopes / 6.0) ** 2 + (places - last) ** 2 + guesses**2)
    for rate, right, answers in rounds:
        curve = guesses + (1.0 - guesses) / (1.0 + np.exp(-slopes * (rate - places)))
        loss = loss + answers * (curve - right) ** 2
    place = np.unravel_index(int(np.argmin(loss)), loss.shape)
    return float(slopes[place]), float(places[place]), float(guesses[place])
