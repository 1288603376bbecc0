"""Group-robust RL: weights of prompts and numbers of answers by observed difficulty (Prompt-GDRO, Rollout-GDRO).

    class of a prompt   the bin of its running success rate, edges 0.4 and 0.75, left only `hysteresis` beyond an edge

    prompt_gdro    score of a class = EMA of its mean loss / its share of the rows,   loss of a row = 1 - success
                   weight = (1 - gamma) softmax(eta score) + gamma / classes,   mean 1 over the step, at most 15

    rollout_gdro   answers to a prompt in proportion to sqrt(v) of its class,   v the EMA of its variance of success
                   whole numbers between `least` and `most` times rollout.samples_per_prompt, in all exactly as planned
                   with `rule: price` sqrt(v / mu), rounded, and after each step log mu <- log mu + rate (spent - 1),
                   spent the answers of the step over those planned: the budget holds in the mean over steps

The released code weighs by the policy loss of the rows, whose mean is near 0 on policy; here it is the failure rate. It
also finds the numbers of answers by a bandit over counts whose costs have a shadow price; here they are those that its
theory derives as optimal, exactly or at such a price. Prompts without a rate are a class of their own. Source: arXiv
2601.19280 and the released code, kishanpb/verl-gdro.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator
from typing_extensions import TypeVar

from opd.errors import ConfigError
from opd_zoo.samplers.base import SignalController, SignalSettings, SuccessRates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import StepPlan
    from student.data.report import StepReport
    from student.data.row import Row
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

NEW = "new"
_LARGEST, _SPENT = 15.0, "rollout_gdro/spent"


class GdroSettings(SignalSettings):
    """Settings that both methods share."""

    edges: list[float] = Field(
        default_factory=lambda: [0.4, 0.75],
        description="Edges between the bins of success rates that form the classes.",
    )
    hysteresis: float = Field(
        0.03, ge=0, description="How far beyond an edge a prompt's rate must go to change its class."
    )
    memory: float = Field(0.5, ge=0, lt=1, description="Share of a prompt's running rate that each step keeps.")
    beta: float = Field(0.12, gt=0, le=1, description="Weight of the newest step in the averages of a class.")

    @field_validator("edges")
    @classmethod
    def _rise(cls, edges: list[float]) -> list[float]:
        if edges != sorted(set(edges)) or not all(0 < edge < 1 for edge in edges):
            raise ValueError(f"edges {edges} must increase, between 0 and 1")
        return edges


GdroSettings_co = TypeVar("GdroSettings_co", bound=GdroSettings, covariant=True, default=GdroSettings)


class Gdro(SignalController[GdroSettings_co]):
    """Base: classes of prompts and an average for each; subclasses say what is averaged."""

    evidence = "text"

    def __init__(self, settings: GdroSettings_co) -> None:
        super().__init__(settings)
        self.rates = SuccessRates(settings.memory)
        self.classes: dict[str, int] = {}
        self.average: dict[str, float] = {}

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse steps of a single prompt, which has nothing to be compared with.

        Raises:
            ConfigError: with the setting to raise.
        """
        super().check(recipe, terms)
        if recipe.rollout.prompts_per_step < 2:
            raise ConfigError(
                f"method {self.settings.name!r} weights the prompts of a step against each other, but there is only "
                "one; raise rollout.prompts_per_step."
            )

    def class_of(self, prompt: Prompt) -> str:
        """The class of a prompt, by its running success rate."""
        found = self.classes.get(self.arm(prompt))
        return NEW if found is None else str(found)

    def measured(self, groups: Sequence[Sequence[float]]) -> float:
        """The quantity that is averaged, from the groups of answers of a class."""
        raise TypeError(f"{type(self).__name__} does not implement measured")

    def observe(self, report: StepReport) -> None:
        """Update the averages by the classes that prompts had in the step, and then rates and classes."""
        results = self.results(report.outcomes)
        by_class: dict[str, list[list[float]]] = {}
        for arm, groups in results.items():
            by_class.setdefault(str(self.classes.get(arm, NEW)), []).extend(groups)
        beta = self.settings.beta
        for name, groups in sorted(by_class.items()):
            new = self.measured(groups)
            self.average[name] = beta * new + (1.0 - beta) * self.average.get(name, new)
        self.rates.learn(results)
        for arm in results:
            self.classes[arm] = self._moved(self.classes.get(arm), self.rates.known[arm])

    def _moved(self, old: int | None, rate: float) -> int:
        edges, slack = self.settings.edges, self.settings.hysteresis
        if old is None:
            return sum(rate >= edge for edge in edges)
        # Within the slack around an edge the class stays, or noise would flip it back and forth.
        above = sum(rate >= edge + slack for edge in edges)
        below = sum(rate >= edge - slack for edge in edges)
        return max(above, min(old, below))

    def state_dict(self) -> dict[str, Any]:
        """The rates, classes and averages."""
        return {**self.rates.state_dict(), "classes": dict(self.classes), "average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.rates.load_state_dict(state)
        self.classes = {str(arm): int(place) for arm, place in state["classes"].items()}
        self.average = {str(name): float(value) for name, value in state["average"].items()}


class PromptGdroSettings(GdroSettings):
    """Settings of Prompt-GDRO."""

    eta: float = Field(0.65, gt=0, description="How sharply weights follow the classes' scores.")
    gamma: float = Field(0.01, ge=0, lt=1, description="Share of the weight that is spread evenly over the classes.")


class PromptGdro(Gdro[PromptGdroSettings]):
    """Weights prompts by how hard their class is (Prompt-GDRO)."""

    def __init__(self, settings: PromptGdroSettings) -> None:
        super().__init__(settings)
        self._weight: dict[str, float] = {}

    def measured(self, groups: Sequence[Sequence[float]]) -> float:
        """The mean loss, 1 - success."""
        values = [1.0 - value for group in groups for value in group]
        return math.fsum(values) / len(values)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Set the weight of each prompt, from the planned rows of all ranks."""
        names = {row.key.uid: self.class_of(row.prompt) for row in plan.rows}
        rows = [names[row.key.uid] for row in plan.rows]
        shares = {name: rows.count(name) / len(rows) for name in sorted(set(rows))}
        # Divide losses by the shares, because a frequent class already counts once per row.
        weights = class_weights(
            {name: self.average.get(name, 0.0) / share for name, share in shares.items()},
            self.settings.eta,
            self.settings.gamma,
        )
        # Mean 1 over rows, so that the effective learning rate does not change.
        mean = math.fsum(weights[name] * share for name, share in shares.items()) if rows else 1.0
        if plan.step != self._planned:
            # Weights of earlier steps would also apply to replayed rows, but would be lost on a resume.
            self._weight = {}
        self._weight |= {uid: min(weights[name] / mean, _LARGEST) for uid, name in names.items()}
        for prompt in {row.key.uid: row.prompt for row in plan.rows}.values():
            weight = self._weight[prompt.uid]
            self.note(plan, prompt, moved=abs(weight - 1.0), known=float(names[prompt.uid] != NEW))
        tagged = {row.key.uid: self.arm(row.prompt) for row in plan.rows}
        if self.settings.by in ("prompt", "domain"):
            return plan
        return replace(
            plan,
            rows=tuple(replace(r, tags={**r.tags, self.settings.by: tagged[r.key.uid]}) for r in plan.rows),
        )

    def compose(self, rows: list[Row]) -> list[Row]:
        """Multiply the rows' weights by those of their prompts."""
        for row in super().compose(rows):
            row.weight *= self._weight.get(row.key.uid, 1.0)
        return rows


class RolloutGdroSettings(GdroSettings):
    """Settings of Rollout-GDRO."""

    least: int = Field(2, ge=1, description="Minimum number of answers to a prompt.")
    most: float = Field(
        3.0, ge=1, description="Maximum number of answers to a prompt, in multiples of rollout.samples_per_prompt."
    )
    rule: Literal["theory", "price"] = Field(
        "theory", description="theory: each step has as many answers as planned; price: so many in the mean over steps."
    )
    rate: float = Field(0.05, gt=0, le=1, description="With rule price: how fast the price follows what was spent.")


class RolloutGdro(Gdro[RolloutGdroSettings]):
    """Sets the number of answers to a prompt by the variance of its class (Rollout-GDRO)."""

    def __init__(self, settings: RolloutGdroSettings) -> None:
        super().__init__(settings)
        self.price = 0.0
        """Log of mu over that at which prompts of the variance 1/4 have as many answers as planned."""

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse bounds that leave every prompt the same number of answers.

        Raises:
            ConfigError: with the settings to change.
        """
        super().check(recipe, terms)
        samples = recipe.rollout.samples_per_prompt
        if self.settings.least >= samples or int(self.settings.most * samples) <= samples:
            raise ConfigError(
                f"method {self.settings.name!r} gives each prompt between least {self.settings.least} and most "
                f"{self.settings.most:g} x {samples} answers, which always makes {samples}; lower least, or raise "
                "most or rollout.samples_per_prompt."
            )

    def measured(self, groups: Sequence[Sequence[float]]) -> float:
        """The mean variance of success within a group."""
        found = []
        for group in groups:
            mean = math.fsum(group) / len(group)
            found.append(math.fsum((value - mean) ** 2 for value in group) / len(group))
        return math.fsum(found) / len(found)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Set each prompt's number of answers; an unmeasured class counts with the largest variance, 1/4."""
        prompts = list({row.key.uid: row.prompt for row in plan.rows}.values())
        if not prompts:
            return plan
        planned = len(plan.rows) // len(prompts)
        names = [self.class_of(prompt) for prompt in prompts]
        variances = [self.average.get(name, 0.25) for name in names]
        least, most = min(self.settings.least, planned), max(planned, int(self.settings.most * planned))
        if self.settings.rule == "price":
            wanted = [planned * math.sqrt(4.0 * max(v, 0.0) * math.exp(-self.price)) for v in variances]
            counts = [min(max(round(count), least), most) for count in wanted]
        else:
            counts = allocate(variances, len(plan.rows), least=least, most=most)
        for prompt, name, count in zip(prompts, names, counts, strict=True):
            self.note(plan, prompt, moved=abs(count - planned), known=float(name != NEW))
            self._notes[prompt.uid][_SPENT] = count / planned
        rows = (self.rows_of(plan, p, n) for p, n in zip(prompts, counts, strict=True))
        return replace(plan, rows=tuple(row for mine in rows for row in mine))

    def observe(self, report: StepReport) -> None:
        """Update the averages, and the price by what was spent on each prompt."""
        super().observe(report)
        spent = {outcome.uid: outcome.notes[_SPENT] for outcome in report.outcomes if _SPENT in outcome.notes}
        if spent and self.settings.rule == "price":
            self.price += self.settings.rate * (math.fsum(spent.values()) / len(spent) - 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The rates, classes, averages and the price."""
        return {**super().state_dict(), "price": self.price}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.price = float(state["price"])


def class_weights(scores: Mapping[str, float], eta: float, gamma: float) -> dict[str, float]:
    """(1 - gamma) softmax(eta score) + gamma / classes, by class."""
    if not scores:
        return {}
    best = max(scores.values())
    powers = {name: math.exp(eta * (score - best)) for name, score in scores.items()}
    total = math.fsum(powers.values())
    return {name: (1.0 - gamma) * power / total + gamma / len(scores) for name, power in powers.items()}


def allocate(variances: Sequence[float], total: int, *, least: int, most: int) -> list[int]:
    """Whole numbers in [least, most] that add up to `total`, as nearly in proportion to sqrt(variance) as they can.

    They are given out one at a time, to the place farthest below its share; ties go to the earlier place. If `most`
    is reached everywhere, they add up to less than `total`.
    """
    counts = [least] * len(variances)
    width = [math.sqrt(max(variance, 0.0)) for variance in variances]
    sum_of_widths = math.fsum(width)
    share = [total * w / sum_of_widths if sum_of_widths else total / len(width) for w in width]
    for _ in range(total - sum(counts)):
        able = [i for i, count in enumerate(counts) if count < most]
        if not able:
            break
        # One at a time, because rounded shares need not add up to `total`.
        counts[max(able, key=lambda i: (share[i] - counts[i], -i))] += 1
    return counts
