"""Base of prompt samplers: methods that draw more prompts than a step needs and keep those with the highest scores.

    pool    = the planned prompts and (candidates - 1) times as many further ones of the run
    chosen  = the `prompts_per_step` of the pool with the highest scores

Every rank plans the whole step from the same state, which comes from the outcomes of all ranks, so all ranks make the
same choice, and an interrupted step is planned again as it was. The result of a prompt is its success in [0, 1]: the
mean reward of its answers, clipped, or with `signal: divergence` exp(-d / scale), where d is the divergence from the
teacher in nats per token, estimated from the sampled tokens. Samplers therefore work for distillation too; that map is
ours.

Put samplers before other methods of a recipe, since the rows of prompts that they add are planned by the recipe alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypeVar

from opd.errors import ConfigError, PluginError, short
from opd.wire.types import PayloadSpec
from student.data.needs import TEACHER, Needs, SignalNeed
from student.data.plan import plan_step
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from opd.tasks.prompt import Prompt
    from student.data.outcome import Outcome
    from student.data.plan import PlannedRow, StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe
    from student.settings.rollout import RolloutSettings


class SignalSettings(ControllerSettings):
    """Settings of methods that learn from the results of prompts."""

    signal: Literal["reward", "divergence"] = Field(
        "reward",
        description="What counts as a prompt's success: its mean reward, or how close the student is to the teacher.",
    )
    scale: float = Field(1.0, gt=0, description="With signal divergence: nats per token at which success is 1/e.")
    by: str = Field(
        "prompt",
        description="What has a history: each prompt, each domain, or each value of a kept column. A procedural task "
        "hardly ever gives a prompt twice, so set it to its domain or a column there.",
    )
    seed: int = Field(0, ge=0, description="Seed of the random part of the choice.")


SignalSettings_co = TypeVar("SignalSettings_co", bound=SignalSettings, covariant=True, default=SignalSettings)


class SamplerSettings(SignalSettings):
    """Settings that every sampler has."""

    candidates: int = Field(
        4, ge=1, description="Number of prompts to choose from, in multiples of rollout.prompts_per_step."
    )


SamplerSettings_co = TypeVar("SamplerSettings_co", bound=SamplerSettings, covariant=True, default=SamplerSettings)


class SignalController(Controller[SignalSettings_co]):
    """Base of methods that learn from the success of prompts or of kinds of prompts (arms)."""

    remembers: ClassVar[bool] = True
    """Whether it uses earlier outcomes of the same prompt or kind of prompts."""

    @property
    def traits(self) -> Traits:
        by = self.settings.by
        return Traits(
            columns=() if by in ("prompt", "domain") else (by,),
            tags={} if by in ("prompt", "domain") else {by: ""},
            remembers_prompts=self.remembers and by == "prompt",
            why={
                "works_ahead": "it remembers what a step was planned from until the step has been trained on",
                "remembers_prompts": "set by: domain, or a column that prompts share",
            },
        )

    def __init__(self, settings: SignalSettings_co) -> None:
        super().__init__(settings)
        self._rollout: RolloutSettings | None = None
        self._notes: dict[str, dict[str, float]] = {}
        self._planned = -1

    def needs(self) -> Needs:
        """Rewards, or the teacher's log-probs of the sampled tokens."""
        if self.settings.signal == "reward":
            return Needs(reward="any")
        return Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled()),))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Keep the recipe's settings of the rollout, by which rows are planned.

        Raises:
            ConfigError: for a column in `by` that prompts do not keep.
        """
        self._rollout = recipe.rollout

    def arm(self, prompt: Prompt) -> str:
        """The arm of a prompt, which has a history of results: the prompt, its domain or its column, by `by`."""
        if self.settings.by == "prompt":
            return prompt.uid
        return (prompt.domain or "") if self.settings.by == "domain" else str(prompt.extra.get(self.settings.by, ""))

    def _arm_of(self, outcome: Outcome) -> str:
        """The arm of a sampled row."""
        if self.settings.by == "prompt":
            return outcome.uid
        return outcome.domain if self.settings.by == "domain" else outcome.tags.get(self.settings.by, "")

    def success(self, outcome: Outcome) -> float | None:
        """The success of a row, in [0, 1]; None if it is unknown or the row is not on policy."""
        # Given, hinted and replayed answers do not show how often the present student succeeds by itself.
        if not outcome.on_policy:
            return None
        if self.settings.signal == "reward":
            return None if outcome.reward is None else min(max(outcome.reward, 0.0), 1.0)
        if TEACHER not in outcome.sums or not outcome.tokens:
            return None
        divergence = (outcome.sums["behaviour"] - outcome.sums[TEACHER]) / outcome.tokens
        return math.exp(-max(divergence, 0.0) / self.settings.scale)

    def results(self, outcomes: Sequence[Outcome]) -> dict[str, list[list[float]]]:
        """By arm, the successes of each group of answers."""
        groups: dict[tuple[str, str], list[float]] = {}
        for outcome in outcomes:
            value = self.success(outcome)
            if value is not None:
                groups.setdefault((self._arm_of(outcome), outcome.uid), []).append(value)
        found: dict[str, list[list[float]]] = {}
        for (arm, _), values in groups.items():
            found.setdefault(arm, []).append(values)
        return found

    def rows_of(self, plan: StepPlan, prompt: Prompt, samples: int | None = None) -> tuple[PlannedRow, ...]:
        """Rows for a prompt: those that the plan has, or new ones; with `samples`, this many new ones."""
        known = tuple(row for row in plan.rows if row.key.uid == prompt.uid)
        if self._rollout is None:
            raise RuntimeError(f"method {self.settings.name!r} plans before it has seen the recipe.")
        if not known or samples is not None:
            s = self._rollout
            known = plan_step(
                plan.step,
                [prompt],
                samples=samples or s.samples_per_prompt,
                max_new_tokens=s.max_new_tokens,
                temperature=s.temperature,
            ).rows
        if self.settings.by in ("prompt", "domain"):
            return known
        return tuple(replace(row, tags={**row.tags, self.settings.by: self.arm(prompt)}) for row in known)

    def note(self, plan: StepPlan, prompt: Prompt, **values: float) -> None:
        """Attach `values` to the step's rows of a prompt, so that all ranks get them; their means become metrics."""
        if plan.step != self._planned:
            self._notes, self._planned = {}, plan.step
        self._notes[prompt.uid] = {f"{self.label}/{name}": value for name, value in values.items()}

    def compose(self, rows: list[Row]) -> list[Row]:
        """Write the notes on the rows."""
        for row in rows:
            row.notes.update(self._notes.get(row.key.uid, {}))
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Means of the notes over prompts, and informative_share: prompts whose answers differ in success."""
        noted: dict[str, dict[str, float]] = {}
        for outcome in services.outcomes:
            # All rows of a prompt carry the same notes, so one row is enough.
            noted.setdefault(outcome.uid, dict(outcome.notes))
        names = sorted({name for notes in noted.values() for name in notes if name.startswith(f"{self.label}/")})
        metrics = {}
        for name in names:
            values = [notes[name] for notes in noted.values() if name in notes]
            metrics[name] = math.fsum(values) / len(values)
        groups = [group for found in self.results(services.outcomes).values() for group in found]
        if groups:
            metrics[f"{self.label}/informative_share"] = sum(len(set(group)) > 1 for group in groups) / len(groups)
        return metrics


class Sampler(SignalController[SamplerSettings_co]):
    """Base of samplers: subclasses give `scores` or `choose`, and learn in `observe`."""

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a pool that leaves no choice.

        Raises:
            ConfigError: with the setting to raise.
        """
        super().check(recipe, terms)
        if self.settings.candidates == 1:
            raise ConfigError(
                f"method {self.settings.name!r} with candidates 1 has no prompts to choose from, so it changes "
                "nothing; raise candidates, for example to 4."
            )

    def plan(self, plan: StepPlan) -> StepPlan:
        """Choose the prompts of the step."""
        planned = list({row.key.uid: row.prompt for row in plan.rows}.values())
        if not planned:
            return plan
        rng = stream(self.settings.seed, self.label, plan.step, planned[0].uid)
        pool = self.draw(planned, plan.step)
        chosen = self.choose(pool, len(planned), rng, plan)
        first = {prompt.uid for prompt in planned}
        for prompt, gain in chosen:
            values = {"known": float(self.knows(prompt)), "replaced": float(prompt.uid not in first)}
            self.note(plan, prompt, gain=gain, **values)
        return replace(plan, rows=tuple(row for prompt, _ in chosen for row in self.rows_for(plan, prompt)))

    def rows_for(self, plan: StepPlan, prompt: Prompt) -> tuple[PlannedRow, ...]:
        """Rows of a chosen prompt."""
        return self.rows_of(plan, prompt)

    def draw(self, planned: Sequence[Prompt], step: int) -> list[Prompt]:
        """The pool: distinct prompts, the planned ones first."""
        pool = list(planned)
        if self.settings.candidates > 1:
            pool += self.services.prompts(len(planned) * (self.settings.candidates - 1))
        # A short table wraps around within one pool, and a prompt chosen twice would be a group of twice the size.
        return list({prompt.uid: prompt for prompt in pool}.values())

    def choose(
        self, pool: Sequence[Prompt], count: int, rng: np.random.Generator, plan: StepPlan
    ) -> list[tuple[Prompt, float]]:
        """The prompts of the step in the order of the pool, each with its score minus the mean of the pool.

        Raises:
            PluginError: for scores of a wrong number, or that are not numbers.
        """
        scores = self.scores(pool, rng)
        if not hasattr(scores, "__len__"):
            raise PluginError(
                f"{type(self).__name__}.scores returned {short(scores)}; it must return a list of numbers."
            )
        if len(scores) != len(pool):
            raise PluginError(f"{type(self).__name__} returned {len(scores)} scores for a pool of {len(pool)} prompts.")
        for prompt, score in zip(pool, scores, strict=True):
            if not hasattr(score, "__float__") or math.isnan(score):  # NaN has no order
                raise PluginError(
                    f"{type(self).__name__} returned the score {short(score)} for {prompt.name}; it must be a number."
                )
        # Ties go to the earlier prompt and the pool's order is kept, so the choice depends on the scores alone.
        order = sorted(range(len(pool)), key=lambda i: (-scores[i], i))[:count]
        mean = math.fsum(scores) / len(scores)
        return [(pool[i], scores[i] - mean) for i in sorted(order)]

    def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
        """The score of each prompt of the pool; the highest are chosen."""
        raise PluginError(f"{type(self).__name__} does not implement scores.")

    def knows(self, prompt: Prompt) -> bool:
        """Whether the prompt, or its kind, has a history."""
        return False


class SuccessRates:
    """Running success rates by arm: the mean of each new group of answers enters with weight 1 - memory.

    Args:
        memory: weight of the past; 0 keeps only the last rate.
    """

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.known: dict[str, float] = {}

    def learn(self, results: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Update the rates with the successes of a step."""
        for arm, groups in results.items():
            for group in groups:
                mean = math.fsum(group) / len(group)
                old = self.known.get(arm, mean)
                self.known[arm] = self.memory * old + (1.0 - self.memory) * mean

    def get(self, arm: str) -> float | None:
        """The rate of an arm; None if it has none yet."""
        return self.known.get(arm)

    def state_dict(self) -> dict[str, Any]:
        """The rates."""
        return {"rates": dict(self.known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.known = {str(arm): float(rate) for arm, rate in state["rates"].items()}


class RateSampler(Sampler[SamplerSettings_co]):
    """A sampler whose state is the success rate of each arm when it was last answered."""

    def __init__(self, settings: SamplerSettings_co) -> None:
        super().__init__(settings)
        self.rates = SuccessRates(0.0)

    def knows(self, prompt: Prompt) -> bool:
        """Whether the arm has a rate."""
        return self.rates.get(self.arm(prompt)) is not None

    def observe(self, report: StepReport) -> None:
        """Update the rates with the step."""
        self.rates.learn(self.results(report.outcomes))

    def state_dict(self) -> dict[str, Any]:
        """The rates."""
        return self.rates.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.rates.load_state_dict(state)
